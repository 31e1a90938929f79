// The last JavaScript SDK of protocol 0.3, unmodified, against an agent that serves it: `a2a-0.3: on`.

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import {
  AgentCardResolver, AuthenticatedExtendedCardNotConfiguredError, ClientFactory, PushNotificationNotSupportedError,
  TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError,
} from '@a2a-js/sdk/client';

process.env.RIALTO__AGENTS__0__A2A_0_3 = 'on';
const { start } = await import('../js/rialto.js');

let server;
let client;
before(async () => {
  server = await start('/v03');
  client = await new ClientFactory().createFromUrl(`${server.url}/`);
});
after(() => server?.stop());

const message = (text, rest = {}) => ({ kind: 'message', messageId: randomUUID(), role: 'user', parts: [{ kind: 'text', text }], ...rest });
const send = (text, rest, configuration = {}) => client.sendMessage({ message: message(text, rest), configuration });
const post = (text, rest) => send(text, rest, { blocking: false });
const stream = (text, rest) => collect(client.sendMessageStream({ message: message(text, rest) }));
const answer = (task) => (task.artifacts ?? []).flatMap((one) => one.parts).map((part) => part.text ?? '').join('');

async function collect(events) {
  const all = [];
  for await (const event of events) all.push(event);
  return all;
}

/** The text of these events' artifacts. */
const text = (events) =>
  events.map((event) => (event.kind === 'task' ? answer(event) : (event.artifact?.parts ?? []).map((part) => part.text ?? '').join(''))).join('');

test('the card is one of 0.3', async () => {
  const card = await AgentCardResolver.default.resolve(`${server.url}/`);
  assert.deepEqual([card.protocolVersion, card.preferredTransport, card.url], ['0.3.0', 'JSONRPC', server.url]);
  assert.equal(card.capabilities.streaming, true);
  assert.ok(card.skills[0].tags.length > 0);
});

test('blocking send and get', async () => {
  const task = await send('echo hello');
  assert.deepEqual([task.kind, task.status.state, answer(task)], ['task', 'completed', 'hello']);
  assert.deepEqual(task.history.map((one) => [one.kind, one.role]), [['message', 'user'], ['message', 'agent']]);
  assert.deepEqual(await client.getTask({ id: task.id }), task);
  assert.equal((await client.getTask({ id: task.id, historyLength: 1 })).history.length, 1);
  assert.equal((await client.getTask({ id: task.id, historyLength: 0 })).history.length, 2, '0 is all to 0.3');
});

test('a send that does not block', async () => {
  const task = await post('sleep:0.3');
  assert.ok(['submitted', 'working'].includes(task.status.state));
  for (let tries = 0; (await client.getTask({ id: task.id })).status.state !== 'completed'; tries++) {
    assert.ok(tries < 400);
    await sleep(25);
  }
});

test('stream and get agree', async () => {
  const events = await stream('chunks:20x5');
  assert.equal(events[0].kind, 'task');
  const finals = events.filter((event) => event.kind === 'status-update').map((event) => event.final);
  assert.deepEqual(finals, finals.map((_, at) => at === finals.length - 1));
  const stored = await client.getTask({ id: events[0].id });
  assert.deepEqual(stored.status, events.at(-1).status);
  assert.equal(text(events), answer(stored));
  assert.ok(answer(stored).length > 0);
});

test('silence on a stream is no event', async () => {
  const task = await post('silent:5');
  for (const events of await Promise.all([stream('silent:5'), collect(client.resubscribeTask({ id: task.id }))])) {
    assert.deepEqual([events.at(-1).status.state, events.at(-1).final], ['completed', true]);
  }
});

test('cancel a running task', async () => {
  const task = await post('sleep:60');
  assert.equal((await client.cancelTask({ id: task.id })).status.state, 'canceled');
  assert.equal((await client.getTask({ id: task.id })).status.state, 'canceled');
  await assert.rejects(client.cancelTask({ id: task.id }), TaskNotCancelableError);
});

test('resubscribe to a running task', async () => {
  const task = await post('chunks:40x20');
  const first = client.resubscribeTask({ id: task.id });
  assert.equal((await first.next()).value.id, task.id);
  await first.return();
  const events = await collect(client.resubscribeTask({ id: task.id }));
  const stored = await client.getTask({ id: task.id });
  assert.equal(stored.status.state, 'completed');
  assert.equal(events.at(-1).final, true);
  assert.equal(text(events), answer(stored));
});

test('the next turn by taskId, and by contextId', async () => {
  const asked = await send('ask');
  assert.equal(asked.status.state, 'input-required');
  assert.ok(asked.status.message.parts[0].text);
  const done = await send('seven', { taskId: asked.id, contextId: asked.contextId });
  assert.deepEqual([done.id, done.contextId, done.status.state], [asked.id, asked.contextId, 'completed']);
  assert.ok(answer(done).includes('seven'));
  assert.equal(done.history.length, 4);
  const other = await send('echo two', { contextId: asked.contextId });
  assert.equal(other.contextId, asked.contextId);
  assert.notEqual(other.id, asked.id);
});

test('streamed turns of one task', async () => {
  const asked = await stream('ask');
  assert.deepEqual([asked.at(-1).status.state, asked.at(-1).final], ['input-required', true]);
  const done = await stream('nine', { taskId: asked[0].id });
  assert.deepEqual([done[0].id, done.at(-1).status.state, done.at(-1).final], [asked[0].id, 'completed', true]);
});

test('numbers in data parts keep their value', async () => {
  const data = { one: 1, neg: -7, max: 9007199254740991, frac: 0.1, deep: [{ zero: 0 }, [1, 2.5]], none: null };
  const parts = [{ kind: 'text', text: 'data' }, { kind: 'data', data }];
  const task = await client.sendMessage({ message: message('', { parts }) });
  const back = task.artifacts.flatMap((one) => one.parts).filter((part) => part.kind === 'data');
  assert.deepEqual(back.map((part) => part.data), [data]);
});

test('errors arrive as the errors of the SDK', async () => {
  const done = await send('echo done');
  await assert.rejects(client.getTask({ id: 'nope' }), TaskNotFoundError);
  await assert.rejects(send('echo x', { taskId: randomUUID() }), TaskNotFoundError);
  await assert.rejects(send('echo x', { taskId: done.id }), UnsupportedOperationError);
  await assert.rejects(client.cancelTask({ id: done.id }), TaskNotCancelableError);
  // Of a stream, the SDK gives the error as the cause.
  const cause = (kind) => (error) => error.cause instanceof kind;
  await assert.rejects(stream('echo x', { taskId: done.id }), cause(UnsupportedOperationError));
  await assert.rejects(collect(client.resubscribeTask({ id: 'nope' })), cause(TaskNotFoundError));
  await assert.rejects(collect(client.resubscribeTask({ id: done.id })), cause(UnsupportedOperationError));
  await assert.rejects(client.transport.getExtendedAgentCard(), AuthenticatedExtendedCardNotConfiguredError);
  const pushNotificationConfig = { url: 'https://hook.example.test/' };
  await assert.rejects(
    client.transport.setTaskPushNotificationConfig({ taskId: done.id, pushNotificationConfig }), PushNotificationNotSupportedError);
  await assert.rejects(client.transport.listTaskPushNotificationConfig({ id: done.id }), PushNotificationNotSupportedError);
});

test('40 calls at once', async () => {
  const tasks = await Promise.all(Array.from({ length: 40 }, (_, n) => send(`echo ${n}`)));
  assert.deepEqual(tasks.map(answer), Array.from({ length: 40 }, (_, n) => `${n}`));
});
