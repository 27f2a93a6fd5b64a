"""The command line of `scripts/cluster`: `python -m cluster.harness` with tests/ on the path."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.harness import buildah, control, debian, lifecycle, node, programs
from cluster.harness.layout import Layout
from cluster.harness.settings import Settings

DEFAULTS = Settings()


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(
        prog="scripts/cluster", description="A real Kubernetes cluster on one machine, for tests."
    )
    commands = top.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "build", help="install Debian packages; build Kubernetes and the rest into the cache"
    )
    make.add_argument("only", nargs="*", help="programs (default: all)")
    _image_commands(commands)
    _up_command(commands)
    end = commands.add_parser("down", help="remove the cluster")
    end.add_argument("--keep-logs", action="store_true")
    commands.add_parser("status", help="what runs")
    put = commands.add_parser("load", help="import image archives into every node")
    put.add_argument("archive", nargs="+")
    _node_commands(commands)
    for name in ("control-stop", "control-start"):
        words = "a component of the control plane"
        commands.add_parser(name, help=words).add_argument("component", choices=control.COMPONENTS)
    return top


def _image_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    commands.add_parser("image-base", help="make the base image for Dockerfiles, print its name")
    image = commands.add_parser("image-build", help="build a Dockerfile into an image archive")
    image.add_argument("context")
    image.add_argument("tag")
    image.add_argument("output")
    image.add_argument("--file", help="Dockerfile (default: the one in the context)")
    image.add_argument("--target", default="", help="stage of the Dockerfile (default: the last)")
    image.add_argument("--build-arg", action="append", default=[])


def _up_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    boot = commands.add_parser("up", help="boot the cluster and print the path of its kubeconfig")
    for name, kind in {
        "nodes": int,
        "zones": int,
        "grace_seconds": int,
        "toleration_seconds": int,
        "reserved_memory": str,
        "reserved_cpu": str,
    }.items():
        option, default = "--" + name.replace("_", "-"), getattr(DEFAULTS, name)
        boot.add_argument(option, type=kind, default=default, help=f"default: {default}")
    boot.add_argument("--proxy-mode", choices=["nftables", "iptables"], default=DEFAULTS.proxy_mode)
    boot.add_argument(
        "--no-network-policy",
        dest="network_policy",
        action="store_false",
        help="do not enforce NetworkPolicy (kube-router)",
    )
    boot.add_argument(
        "--image",
        action="append",
        default=[],
        help="image archive that every node has from the start (repeatable)",
    )
    boot.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="SOURCE:TARGET",
        help="show a folder of the machine on every node, read-only (repeatable)",
    )
    boot.add_argument("--timeout", type=float, default=120.0)


def _node_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, words in {
        "node-kill": "power loss of a node",
        "node-start": "power the node on again",
        "node-heal": "end every partition of a node",
    }.items():
        commands.add_parser(name, help=words).add_argument("node", type=int)
    cut = commands.add_parser("node-partition", help="cut a node off from all others, or from some")
    cut.add_argument("node", type=int)
    cut.add_argument(
        "--from",
        dest="others",
        type=int,
        action="append",
        default=[],
        help="only from this node (0: control plane; repeatable)",
    )
    inside = commands.add_parser("node-exec", help="run a command on a node")
    inside.add_argument("node", type=int)
    inside.add_argument("argv", nargs=argparse.REMAINDER)
    beside = commands.add_parser("exec", help="run a command in the control plane's network")
    beside.add_argument("argv", nargs=argparse.REMAINDER)


def _wanted(args: argparse.Namespace) -> Settings:
    mounts = []
    for mount in args.mount:
        source, _, target = mount.partition(":")
        if not Path(source).is_dir() or not target.startswith("/"):
            sys.exit(f"--mount {mount}: expected an existing folder, a colon and an absolute path")
        mounts.append(f"{Path(source).resolve()}:{target}")
    return Settings(
        nodes=args.nodes,
        zones=args.zones,
        grace_seconds=args.grace_seconds,
        toleration_seconds=args.toleration_seconds,
        proxy_mode=args.proxy_mode,
        network_policy=args.network_policy,
        reserved_memory=args.reserved_memory,
        reserved_cpu=args.reserved_cpu,
        mounts=tuple(mounts),
        images=tuple(str(Path(path).resolve()) for path in args.image),
    )


def _build(cluster: Layout, args: argparse.Namespace) -> None:
    if os.geteuid() == 0:
        debian.install()
    programs.build(args.only)


def _image_base(cluster: Layout, args: argparse.Namespace) -> None:
    debian.install()
    print(buildah.base())


def _image_build(cluster: Layout, args: argparse.Namespace) -> None:
    debian.install()
    output = Path(args.output)
    buildah.build_image(
        Path(args.context), args.tag, output, args.file, args.target, args.build_arg
    )


def _up(cluster: Layout, args: argparse.Namespace) -> None:
    with lifecycle.locked(cluster):
        print(lifecycle.up(cluster, _wanted(args), args.timeout))


def _down(cluster: Layout, args: argparse.Namespace) -> None:
    with lifecycle.locked(cluster):
        lifecycle.down(cluster, keep_logs=args.keep_logs)


def _settings(cluster: Layout) -> Settings:
    settings = Settings.read(cluster)
    return settings or sys.exit("the cluster is not up")


def _exec(cluster: Layout, args: argparse.Namespace) -> None:
    argv = ["nsenter", f"--net={control.netns_file(cluster)}", *_command(args)]
    sys.exit(subprocess.run(argv).returncode)


def _command(args: argparse.Namespace) -> list[str]:
    """What comes after the options; `--` before it is optional."""
    return args.argv[1:] if args.argv[:1] == ["--"] else args.argv


COMMANDS: dict[str, Callable[[Layout, argparse.Namespace], object]] = {
    "build": _build,
    "image-base": _image_base,
    "image-build": _image_build,
    "up": _up,
    "down": _down,
    "load": lambda c, a: lifecycle.load(c, _settings(c), a.archive),
    "status": lambda c, a: lifecycle.status(c, _settings(c)),
    "node-kill": lambda c, a: node.kill(c, a.node),
    "node-start": lambda c, a: node.start(c, a.node, _settings(c)),
    "node-partition": lambda c, a: node.partition(c, a.node, a.others),
    "node-heal": lambda c, a: node.heal(c, a.node),
    "node-exec": lambda c, a: sys.exit(node.enter(c, a.node, _command(a)).returncode),
    "exec": _exec,
    "control-stop": lambda c, a: control.stop(c, a.component),
    "control-start": lambda c, a: control.start(c, a.component, _settings(c)),
}


def main() -> None:
    """Run one command; failures that are not ours end with their words alone."""
    args = parser().parse_args()
    if args.command != "build" and os.geteuid() != 0:
        sys.exit("must run as root")
    try:
        COMMANDS[args.command](Layout.load(), args)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
