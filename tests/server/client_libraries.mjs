// Use specdec serve with the npm packages openai and ai: node client_libraries.mjs ADDRESS TEXT
// TEXT is the answer to `question` with 16 tokens at temperature 0, as JSON.
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, streamText, tool } from 'ai';
import OpenAI from 'openai';
import { z } from 'zod';

const [address, expected] = [process.argv[2], JSON.parse(process.argv[3])];
const question = 'one two three';
const settings = { baseURL: `${address}/v1`, apiKey: 'none' };
const fact = z.object({ yes: z.boolean(), n: z.union([z.literal(1), z.literal(2)]) });
const city = z.object({ city: z.enum(['Rome', 'Oslo']) });

async function joined(parts, textOf) {
  let text = '';
  for await (const part of parts) text += textOf(part) ?? '';
  return text;
}

const client = new OpenAI(settings);
const chat = { model: 'main', messages: [{ role: 'user', content: question }], max_tokens: 16, temperature: 0 };
assert.equal((await client.chat.completions.create(chat)).choices[0].message.content, expected);
const chunks = await client.chat.completions.create({ ...chat, stream: true });
assert.equal(await joined(chunks, (chunk) => chunk.choices[0]?.delta?.content), expected);
const short = { model: 'main', input: question, max_output_tokens: 16, temperature: 0 };
assert.equal((await client.responses.create(short)).output_text, expected);

const openai = createOpenAI(settings);
const models = [
  createOpenAICompatible({ name: 'specdec', supportsStructuredOutputs: true, ...settings })('main'),
  openai.chat('main'),
  openai.responses('main'),
  createAnthropic(settings)('main'),
];
for (const model of models) {
  const brief = { model, prompt: question, maxOutputTokens: 16, temperature: 0 };
  assert.equal((await generateText(brief)).text, expected);
  assert.equal(await joined(streamText(brief).textStream, (part) => part), expected);
  const longer = { model, prompt: 'Really?', maxOutputTokens: 200 };
  const { output } = await generateText({ ...longer, output: Output.object({ schema: fact }) });
  fact.parse(output);
  const forced = { ...longer, tools: { weather: tool({ inputSchema: city }) }, toolChoice: 'required' };
  city.parse((await generateText(forced)).toolCalls[0].input);
  city.parse((await streamText(forced).toolCalls)[0].input);
}
