"""The program behind support.fake_kubectl: `kubectl.py STATE CALLS arguments of kubectl...`."""

import json
import socket
import sys
import threading
from pathlib import Path

STATE = json.loads(Path(sys.argv[1]).read_text())
PLURALS = {"pods": "pod", "nodes": "node", "events": "event", "secrets": "secret"}


def main():
    options, words = {}, []
    arguments = iter(sys.argv[3:])
    for argument in arguments:
        if argument in ("-o", "-f", "-c", "--address"):
            options[argument] = next(arguments)
        elif argument.startswith("-"):
            name, _, value = argument.partition("=")
            options[name] = value
        else:
            words.append(argument)
    with open(sys.argv[2], "a") as calls:
        calls.write(" ".join(sys.argv[3:]) + "\n")
    if STATE["down"]:
        fail("The connection to the server 127.0.0.1:6443 was refused")
    if STATE["broken"]:
        fail(STATE["broken"])
    verb, *rest = words
    answers = {"get": get, "apply": apply, "logs": logs, "config": config, "version": version}
    answers |= {"port-forward": forward}
    answers[verb](rest, options)


def fail(words):
    sys.stderr.write(words + "\n")
    raise SystemExit(1)


def get(words, options):
    kind, name = PLURALS.get(words[0], words[0]), words[1] if len(words) > 1 else ""
    if kind in STATE["forbidden"]:
        fail(f'Error from server (Forbidden): {kind}s is forbidden: User "ann" may not')
    if kind in STATE["unknown"]:
        fail(f'error: the server doesn\'t have a resource type "{kind}"')
    items = [tree for of, tree in STATE["objects"] if of == kind]
    if name:
        for tree in items:
            if tree["metadata"]["name"] == name:
                print(json.dumps(tree))
                return
        fail(f'Error from server (NotFound): {kind}s "{name}" not found')
    selector = options.get("--selector", "") or options.get("-l", "")
    for pair in filter(None, selector.split(",")):
        label, _, value = pair.partition("=")
        items = [t for t in items if (t["metadata"].get("labels") or {}).get(label) == value]
    print(json.dumps({"kind": "List", "items": items}))


def apply(words, options):
    json.load(sys.stdin)
    if STATE["apply"]:
        fail(STATE["apply"])
    print("trainingjob.backstay.dev/it")


def logs(words, options):
    name = words[0].removeprefix("pod/") + "/" + options["-c"]
    name += "/previous" if "--previous" in options else ""
    if name not in STATE["logs"]:
        fail(f'Error from server (BadRequest): container "{name}" is waiting to start')
    print(STATE["logs"][name], end="")


def config(words, options):
    print(json.dumps({"contexts": [{"context": {"namespace": STATE["namespace"]}}]}))


def version(words, options):
    print(json.dumps({"serverVersion": {"gitVersion": "v1.34.0"}}))


def forward(words, options):
    target = STATE["forwards"].get(words[0].removeprefix("pod/"))
    if target is None:
        fail("error: unable to forward port because pod is not running")
    host, _, port = target.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    here = listener.getsockname()[1]
    print(f"Forwarding from 127.0.0.1:{here} -> {words[1][1:]}", flush=True)
    while True:
        here, _ = listener.accept()
        there = socket.create_connection((host, int(port)))
        for source, sink in ((here, there), (there, here)):
            threading.Thread(target=carry, args=(source, sink), daemon=True).start()


def carry(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


main()
