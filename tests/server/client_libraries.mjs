// Use specdec serve with the npm packages openai, ai and ollama: node client_libraries.mjs ADDRESS TEXT
// TEXT is the answer of the model main to `question` with 16 tokens at temperature 0, as JSON. With ollama, there is a
// model caller besides, which thinks, and then asks for the weather in Rome: node client_libraries.mjs ADDRESS TEXT ollama
import assert from 'node:assert/strict';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, streamText, tool } from 'ai';
import { Ollama } from 'ollama';
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

async function useOpenAI() {
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
}

async function useOllama() {
  const ollama = new Ollama({ host: address });
  const messages = [{ role: 'user', content: question }];
  const short = { model: 'main', messages, options: { temperature: 0, num_predict: 16 } };
  assert.equal((await ollama.chat(short)).message.content, expected);
  assert.equal(await joined(await ollama.chat({ ...short, stream: true }), (part) => part.message.content), expected);
  const { messages: _, ...prompt } = { ...short, prompt: question };
  assert.equal((await ollama.generate(prompt)).response, expected);
  assert.equal(await joined(await ollama.generate({ ...prompt, stream: true }), (part) => part.response), expected);
  const typed = await ollama.chat({ ...short, format: z.toJSONSchema(fact), options: { num_predict: 100 } });
  fact.parse(JSON.parse(typed.message.content));
  const picture = [{ ...messages[0], images: [new Uint8Array([137, 80])] }];
  assert.ok((await ollama.chat({ ...short, messages: picture })).done);
  const weather = { type: 'function', function: { name: 'weather', parameters: z.toJSONSchema(city) } };
  const calling = { model: 'caller', messages, tools: [weather], think: true };
  for (const stream of [false, true]) {
    const given = await ollama.chat({ ...calling, stream });
    const found = { thinking: '', calls: [] };
    for await (const { message } of stream ? given : [given]) {
      found.thinking += message.thinking ?? '';
      found.calls.push(...(message.tool_calls ?? []));
    }
    assert.ok(found.thinking);
    assert.equal(found.calls.length, 1);
    city.parse(found.calls[0].function.arguments);
    const result = { role: 'tool', tool_name: 'weather', content: 'rain' };
    const after = [...messages, { role: 'assistant', content: '', tool_calls: found.calls }, result];
    assert.ok((await ollama.chat({ ...calling, messages: after })).done);
  }
  const gap = { model: 'caller', prompt: 'def f(', options: { num_predict: 4 } };
  assert.ok((await ollama.generate({ ...gap, suffix: 'return a' })).done);
  assert.ok((await ollama.generate({ ...gap, raw: true })).done);
  assert.deepEqual((await ollama.list()).models.map(({ name }) => name), ['main:latest', 'caller:latest']);
  assert.ok((await ollama.show({ model: 'caller' })).capabilities.includes('thinking'));
  assert.ok((await ollama.ps()).models.length > 0);
  assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+$/);
  for (const stream of [false, true]) {
    const lost = { name: 'ResponseError', status_code: 404, message: /model 'absent' not found/ };
    await assert.rejects(ollama.chat({ ...short, model: 'absent', stream }), lost);
  }
  await assert.rejects(ollama.pull({ model: 'main' }), /does not download models/);
}

await (process.argv[4] === 'ollama' ? useOllama() : useOpenAI());
