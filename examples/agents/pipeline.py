#!/usr/bin/env python3
"""Three slow steps that survive a crash, and stop when canceled.

Each finished step goes to the journal. Should this process, its runner or the machine die, the next attempt is
handed the journal and goes on after the last step. Try it: rialto dev --config examples/agents/pipeline.yaml
"""
import json
import queue
import sys
import threading

STEPS = ["fetch", "think", "write"]
inbox = queue.Queue()


def say(**event):
    print(json.dumps(event), flush=True)


def read():
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put({"type": "cancel"})  # the runner is gone, or done with us


def work(seconds):
    """Stands for real work. False when it is not wanted any more."""
    try:
        return inbox.get(timeout=seconds)["type"] != "cancel"
    except queue.Empty:
        return True


threading.Thread(target=read, daemon=True).start()
turn = inbox.get()
seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
done = [step["name"] for step in turn["journal"]]
for name in STEPS[len(done):]:
    say(type="status", text=name)
    if not work(seconds):
        sys.exit()
    # A step that calls the world uses turn["idempotencyKey"] + name as its key: it may run twice, not act twice.
    say(type="journal", data={"name": name})
say(type="artifact", artifactId="report", name="report.json", lastChunk=True,
    parts=[{"data": {"steps": STEPS, "attempt": turn["attempt"]}, "mediaType": "application/json"}])
say(type="completed", text="done")
