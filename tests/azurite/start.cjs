// Starts Azurite and ends with the process that started it, however that one ends: its end of the
// pipe on standard input then closes. Everything after this file's name is for Azurite.
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));

// Azure takes each term of a SAS token with a stored policy from the token or from the policy, and
// refuses one that is in both (learn.microsoft.com/rest/api/storageservices/define-stored-access-policy).
// Azurite refuses every term in a queue's token and ignores those in a container's.
const terms = `
            for (const [mine, stored] of
                [["startTime", "start"], ["expiryTime", "expiry"], ["permissions", "permission"]]) {
                if (values[mine] !== undefined && accessPolicy[stored])
                    throw StorageErrorFactory_1.default.getAuthorizationFailure("");
                values[mine] = values[mine] ?? accessPolicy[stored];
            }`;
const theirs =
  /(if \(values\.startTime[^]*?\}\s*)?values\.startTime = [^]*?= accessPolicy\.permission;/;

// By the end of a file's path: what it says, and what it should.
const mended = [
  [/[/\\](Queue|Blob)SASAuthenticator\.js$/, theirs, terms],
  // It decodes each packet of a body alone, and a letter that lies in two becomes four others.
  [/generated[/\\]utils[/\\]serializer\.js$/, 'segments.join("")', "Buffer.concat(segments).toString()"],
];
const load = require.extensions[".js"];
require.extensions[".js"] = (module, path) => {
  const mend = mended.find(([file]) => file.test(path));
  if (mend) {
    const compile = module._compile;
    module._compile = (source, name) => {
      const right = source.replace(mend[1], mend[2]);
      if (right === source) throw new Error(`${name} has changed`);
      return compile.call(module, right, name);
    };
  }
  load(module, path);
};

// A clock that differs from this machine's by so many seconds.
const ahead = 1000 * Number(process.env.CLOCK_AHEAD_SECONDS ?? 0);
if (ahead) {
  const Machine = Date;
  globalThis.Date = class extends Machine {
    constructor(...time) {
      time.length ? super(...time) : super(Machine.now() + ahead);
    }
    static now() {
      return Machine.now() + ahead;
    }
  };
  const { ServerResponse } = require("http");
  const { writeHead } = ServerResponse.prototype;
  ServerResponse.prototype.writeHead = function (...head) {
    this.setHeader("Date", new Date().toUTCString()); // else Node's own, of this machine
    return writeHead.apply(this, head);
  };
}

require("./node_modules/azurite/dist/src/azurite.js");
