#!/usr/bin/env python3
"""Answers in capitals, word by word. Try it: rialto dev --config examples/agents/upper.yaml"""
import json
import sys


def say(**event):
    print(json.dumps(event), flush=True)


for line in sys.stdin:
    order = json.loads(line)
    if order["type"] != "turn":
        continue  # "cancel" and "stopping": this agent is done before they matter
    text = "\n".join(part["text"] for part in order["message"]["parts"] if "text" in part)
    if not text:
        say(type="input-required", text="What shall I write in capitals?")
        continue
    for word in text.split(" "):
        say(type="text", text=word.upper() + " ")
    say(type="end")
