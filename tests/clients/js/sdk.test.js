// The official JavaScript SDK, unmodified, on each binding that it has.

import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { after, before, describe, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import {
  CancelTaskRequest, GetTaskRequest, ListTasksRequest, Part, Role, SendMessageRequest, SubscribeToTaskRequest, Task, TaskState,
} from '@a2a-js/sdk';
import { AgentCardResolver, ClientFactory, JsonRpcTransportFactory, RestTransportFactory } from '@a2a-js/sdk/client';
import { GrpcTransportFactory } from '@a2a-js/sdk/client/grpc';
import {
  RequestMalformedError, TaskNotCancelableError, TaskNotFoundError, UnsupportedOperationError,
} from '@a2a-js/sdk/errors';

import { start } from './rialto.js';

const BINDINGS = {
  JSONRPC: () => new JsonRpcTransportFactory(),
  'HTTP+JSON': () => new RestTransportFactory(),
  GRPC: () => new GrpcTransportFactory(),
};

let server;
before(async () => (server = await start()));
after(() => server.stop());

const message = (text, rest = {}) => ({ messageId: randomUUID(), role: 'ROLE_USER', parts: [{ text }], ...rest });
const request = (text, rest = {}, configuration = {}) => SendMessageRequest.fromJSON({ message: message(text, rest), configuration });
const state = (task) => TaskState[task.status.state].replace('TASK_STATE_', '');
const answer = (task) =>
  task.artifacts.flatMap((one) => one.parts).map((part) => (part.content?.$case === 'text' ? part.content.value : '')).join('');
const plain = (codec, value) => JSON.parse(JSON.stringify(codec.toJSON(value)));

async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event.payload);
  return events;
}

/** The task as a client sees it after these events. */
function fold(events) {
  assert.equal(events[0].$case, 'task');
  let task;
  for (const { $case, value } of events) {
    if ($case === 'task') {
      task = Task.fromJSON(Task.toJSON(value));
    } else if ($case === 'statusUpdate') {
      assert.equal(value.taskId, task.id);
      task.status = value.status;
    } else if ($case === 'artifactUpdate') {
      const old = task.artifacts.find((one) => one.artifactId === value.artifact.artifactId);
      if (!old) task.artifacts.push(value.artifact);
      else if (value.append) old.parts.push(...value.artifact.parts);
      else Object.assign(old, value.artifact);
    }
  }
  return task;
}

for (const [binding, transport] of Object.entries(BINDINGS)) {
  describe(binding, () => {
    let client;
    const send = (...args) => client.sendMessage(request(...args));
    const post = (text, rest) => send(text, rest, { returnImmediately: true });
    const get = (id, rest = {}) => client.getTask(GetTaskRequest.fromJSON({ id, ...rest }));

    before(async () => {
      client = await new ClientFactory({ transports: [transport()], preferredTransports: [binding] }).createFromUrl(server.url);
      assert.equal(client.protocolVersion, '1.0');
    });

    test('the card resolver finds an interface for the binding', async () => {
      const card = await AgentCardResolver.default.resolve(server.url);
      assert.ok(card.supportedInterfaces.some((one) => one.protocolBinding === binding && one.protocolVersion === '1.0'));
      assert.equal(card.capabilities.streaming, true);
    });

    test('blocking send', async () => {
      const task = await send('echo hello');
      assert.deepEqual([state(task), answer(task)], ['COMPLETED', 'hello']);
      assert.deepEqual(task.history.map((one) => one.role), [Role.ROLE_USER, Role.ROLE_AGENT]);
    });

    test('stream and get agree', async () => {
      const events = await collect(client.sendMessageStream(request('chunks:20x5')));
      assert.equal(state(events.at(-1).value), 'COMPLETED');
      const seen = fold(events);
      const stored = await get(seen.id);
      assert.deepEqual(plain(Task, { ...stored, history: [] }).artifacts, plain(Task, { ...seen, history: [] }).artifacts);
    });

    test('list pages', async () => {
      const contextId = `ctx-${randomUUID()}`;
      const sent = [];
      for (let n = 0; n < 5; n++) sent.push((await send(`echo ${n}`, { contextId })).id);
      const found = [];
      let pageToken = '';
      do {
        const page = await client.listTasks(ListTasksRequest.fromJSON({ contextId, pageSize: 2, pageToken }));
        assert.deepEqual([page.totalSize, page.pageSize], [5, 2]);
        found.push(...page.tasks.map((task) => task.id));
        pageToken = page.nextPageToken;
      } while (pageToken);
      assert.deepEqual(found, sent.reverse());
    });

    test('cancel a running task', async () => {
      const task = await post('sleep:60');
      assert.equal(state(await client.cancelTask(CancelTaskRequest.fromJSON({ id: task.id }))), 'CANCELED');
      assert.equal(state(await get(task.id)), 'CANCELED');
      await assert.rejects(client.cancelTask(CancelTaskRequest.fromJSON({ id: task.id })), TaskNotCancelableError);
    });

    test('resubscribe to a running task', async () => {
      const task = await post('chunks:40x20');
      const first = client.resubscribeTask(SubscribeToTaskRequest.fromJSON({ id: task.id }));
      assert.equal((await first.next()).value.payload.value.id, task.id);
      await first.return();
      const events = await collect(client.resubscribeTask(SubscribeToTaskRequest.fromJSON({ id: task.id })));
      const stored = await get(task.id);
      assert.equal(state(stored), 'COMPLETED');
      assert.equal(answer(fold(events)), answer(stored));
    });

    test('hanging up does not cancel', async () => {
      const stream = client.sendMessageStream(request('sleep:1'));
      const { id } = (await stream.next()).value.payload.value;
      await stream.return();
      for (let tries = 0; state(await get(id)) !== 'COMPLETED'; tries++) {
        assert.ok(tries < 200);
        await sleep(25);
      }
    });

    test('the next turn by taskId', async () => {
      const asked = await send('ask');
      assert.equal(state(asked), 'INPUT_REQUIRED');
      const done = await send('seven', { taskId: asked.id });
      assert.deepEqual([done.id, done.contextId, state(done)], [asked.id, asked.contextId, 'COMPLETED']);
      assert.ok(answer(done).includes('seven'));
      assert.equal(done.history.length, 4);
    });

    test('the next turn by contextId is a new task', async () => {
      const first = await send('echo one');
      const second = await send('echo two', { contextId: first.contextId });
      assert.equal(second.contextId, first.contextId);
      assert.notEqual(second.id, first.id);
    });

    test('auth required is answered at once and can be continued', async () => {
      const task = await send('auth');
      assert.equal(state(task), 'AUTH_REQUIRED');
      assert.equal(state(await send('granted', { taskId: task.id })), 'COMPLETED');
    });

    test('a failing agent is a failed task', async () => {
      const task = await send('fail');
      assert.equal(state(task), 'FAILED');
      assert.ok(task.status.message.parts.length > 0);
    });

    test('errors arrive as the errors of the SDK', async () => {
      const done = await send('echo done');
      await assert.rejects(get('nope'), TaskNotFoundError);
      await assert.rejects(send('echo x', { taskId: randomUUID() }), TaskNotFoundError);
      await assert.rejects(send('echo x', { taskId: done.id }), UnsupportedOperationError);
      await assert.rejects(client.cancelTask(CancelTaskRequest.fromJSON({ id: done.id })), TaskNotCancelableError);
      await assert.rejects(get(done.id, { historyLength: -1 }), RequestMalformedError);
      const push = { tenant: '', id: '', taskId: done.id, url: 'https://hook.example.test/', token: '', authentication: undefined };
      await assert.rejects(async () => client.createTaskPushNotificationConfig(push), { name: 'PushNotificationNotSupportedError' });
      await assert.rejects(collect(client.resubscribeTask(SubscribeToTaskRequest.fromJSON({ id: 'nope' }))), TaskNotFoundError);
      await assert.rejects(
        collect(client.resubscribeTask(SubscribeToTaskRequest.fromJSON({ id: done.id }))), UnsupportedOperationError);
    });

    test('numbers in data parts keep their value', async () => {
      const data = { one: 1, neg: -7, max: 9007199254740991, frac: 0.1, deep: [{ zero: 0 }, [1, 2.5]] };
      const sent = SendMessageRequest.fromJSON({ message: message('data', { parts: [{ text: 'data' }, { data }] }) });
      const task = await client.sendMessage(sent);
      const parts = task.artifacts.flatMap((one) => one.parts).map((part) => plain(Part, part).data);
      assert.deepEqual(parts.filter((one) => one !== undefined), [data]);
    });

    test('history length', async () => {
      const asked = await send('ask');
      await send('nine', { taskId: asked.id });
      const whole = (await get(asked.id)).history.map((one) => one.messageId);
      assert.equal(whole.length, 4);
      for (const historyLength of [0, 1, 3, 9]) {
        const part = (await get(asked.id, { historyLength })).history.map((one) => one.messageId);
        assert.deepEqual(part, whole.slice(Math.max(0, 4 - historyLength)));
      }
    });

    test('40 calls at once', async () => {
      const tasks = await Promise.all(Array.from({ length: 40 }, (_, n) => send(`echo ${n}`)));
      assert.deepEqual(tasks.map(answer), Array.from({ length: 40 }, (_, n) => `${n}`));
    });

    after(() => client.transport.close?.());
  });
}
