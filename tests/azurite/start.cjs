// Starts Azurite and ends with the process that started it, however that one ends: its end of the
// pipe on standard input then closes. Everything after this file's name is for Azurite.
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
require("./node_modules/azurite/dist/src/azurite.js");
