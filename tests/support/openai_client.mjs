// Asks a gateway by the official npm package. Arguments: address, and an image as a data URL.
// Prints one JSON object with what each way of asking returned.
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(join(process.env.VLORA_NODE_MODULES, "x.js")));
const { default: OpenAI, NotFoundError, BadRequestError } = require("openai");
const [address, image] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `http://${address}/v1`, apiKey: "none", maxRetries: 0 });
const content = [
  { type: "image_url", image_url: { url: image } },
  { type: "text", text: "What color is the square?" },
];
const body = { model: "base", messages: [{ role: "user", content }], max_tokens: 8 };
const found = {};

found.models = [];
for await (const model of client.models.list()) found.models.push(model.id);

const whole = await client.chat.completions.create(body);
found.whole = whole.choices[0].message.content;
found.usage = whole.usage.completion_tokens;

found.streamed = "";
for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
}

const refused = async (fields, kind) => {
  try {
    await client.chat.completions.create({ ...body, ...fields });
    return "no error";
  } catch (error) {
    return error instanceof kind ? error.code : String(error);
  }
};
found.unknown = await refused({ model: "nothing" }, NotFoundError);
found.wrong = await refused({ temperature: -1 }, BadRequestError);

// Leaving the loop closes the connection, which ends the request.
let pieces = 0;
const long = await client.chat.completions.create({
  ...body, max_tokens: 900, ignore_eos: true, stream: true,
});
for await (const _ of long) {
  pieces += 1;
  if (pieces === 3) break;
}
found.pieces = pieces;

console.log(JSON.stringify(found));
