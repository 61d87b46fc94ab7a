// An agent that knows nothing of insitu. The official client finds its server in OPENAI_BASE_URL and OPENAI_API_KEY;
// the question comes on standard input, and what is printed last is the answer.
import OpenAI from "openai";
import { text } from "node:stream/consumers";

const client = new OpenAI();
const stream = process.argv.includes("--stream");
const look = ({ at }) => ({ sky: "blue", grass: "green" })[at] ?? "dark";
const parameters = { type: "object", properties: { at: { type: "string" } } };
const tools = [{ type: "function", function: { name: "look", parameters } }];
const messages = [{ role: "user", content: await text(process.stdin) }];

async function ask() {
  const request = { model: "gpt-5", messages, tools };
  if (stream) return await client.chat.completions.stream(request).finalMessage();
  return (await client.chat.completions.create(request)).choices[0].message;
}

let said = await ask();
while (said.tool_calls?.length) {
  messages.push(said);
  for (const call of said.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: look(JSON.parse(call.function.arguments)) });
  }
  said = await ask();
}
console.log(said.content);
