// Calls of other people's clients, unchanged, against a gateway: what became of each, as in calls.py.
//
//     node calls.mjs CLIENT URL

import { createOpenAI } from "@ai-sdk/openai";
import { DallEAPIWrapper } from "@langchain/openai";
import { generateImage as tanstackImage } from "@tanstack/ai";
import { createOpenaiImage } from "@tanstack/ai-openai";
import { experimental_generateImage, generateImage } from "ai";
import OpenAI from "openai";

const UNKNOWN = "gpt-image-9";
const PNG = "iVBORw0KGgo";

const isPicture = (text) => typeof text === "string" && text.startsWith(PNG);

async function isPictureAt(address) {
  const answer = await fetch(address);
  return isPicture(Buffer.from(await answer.arrayBuffer()).toString("base64"));
}

const CLIENTS = {
  openai: (url) => {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
    const draw = async (model) => {
      const found = await client.images.generate({ model, prompt: "a", size: "64x64" });
      return isPicture(found.data[0].b64_json);
    };
    return {
      "images.generate": () => draw("gpt-image-1"),
      "models.list": async () => (await client.models.list()).data.length === 0,
      "images.generate, a model that nobody has": () => draw(UNKNOWN),
    };
  },
  "@ai-sdk/openai": (url) => {
    const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const generate = generateImage ?? experimental_generateImage;
    const draw = async (name, n) => {
      const model = provider.image(name);
      const found = await generate({ model, prompt: "a", size: "64x64", n, maxRetries: 0 });
      return found.images.every((image) => isPicture(image.base64));
    };
    return {
      generateImage: () => draw("gpt-image-1", 2),
      "generateImage, dall-e-3": () => draw("dall-e-3", 1),
      "generateImage, a model that nobody has": () => draw(UNKNOWN, 1),
    };
  },
  "@langchain/openai": (url) => {
    const options = { baseUrl: `${url}/v1`, apiKey: "none" };
    return {
      "DallEAPIWrapper.invoke": async () =>
        isPictureAt(await new DallEAPIWrapper(options).invoke("a")),
    };
  },
  "@tanstack/ai-openai": (url) => {
    const adapter = createOpenaiImage("gpt-image-1", "none", { baseURL: `${url}/v1` });
    return {
      generateImage: async () => {
        const found = await tanstackImage({ adapter, prompt: "a", size: "1024x1024" });
        return found.images.every((image) => isPicture(image.b64Json));
      },
    };
  },
};

const [name, url] = process.argv.slice(2);
const found = {};
for (const [call, run] of Object.entries(CLIENTS[name](url))) {
  try {
    found[call] = (await run()) ? "drawn" : "answered";
  } catch (error) {
    found[call] = `${error.name}: ${error.message}`;
  }
}
console.log(JSON.stringify(found));
