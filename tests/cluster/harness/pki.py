"""The cluster's certificate authority, its certificates and kubeconfigs (openssl)."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from cluster.harness import layout
from cluster.harness.linux import run

DAYS = "3650"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


class Authority:
    """Signs certificates into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cert = folder / "ca.crt"
        self.key = folder / "ca.key"

    def create(self) -> None:
        """Make the authority and the key that signs service account tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        run(
            "openssl", "req", "-x509", *NEW_KEY, "-days", DAYS, "-subj", "/CN=test-cluster-ca",
            "-addext", "basicConstraints=critical,CA:TRUE",
            "-addext", "keyUsage=critical,digitalSignature,keyCertSign,cRLSign",
            "-keyout", str(self.key), "-out", str(self.cert),
        )  # fmt: skip
        account = self.folder / "service-account.key"
        run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(account))

    def issue(self, name: str, user: str, group: str = "", hosts: tuple[str, ...] = ()) -> None:
        """Issue name.crt and name.key for a user, and for a server if hosts are given."""
        request = self.folder / f"{name}.csr"
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        run(
            "openssl", "req", "-new", *NEW_KEY, "-subj", subject,
            "-keyout", str(self.folder / f"{name}.key"), "-out", str(request),
        )  # fmt: skip
        usage = "clientAuth,serverAuth" if hosts else "clientAuth"
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={usage}",
            "subjectKeyIdentifier=hash",
            "authorityKeyIdentifier=keyid",
        ]
        if hosts:
            names = [f"{'IP' if h.replace('.', '').isdigit() else 'DNS'}:{h}" for h in hosts]
            extensions.append("subjectAltName=" + ",".join(names))
        config = self.folder / f"{name}.ext"
        config.write_text("\n".join(extensions) + "\n")
        run(
            "openssl", "x509", "-req", "-in", str(request), "-CA", str(self.cert),
            "-CAkey", str(self.key), "-days", DAYS, "-extfile", str(config),
            "-out", str(self.folder / f"{name}.crt"),
        )  # fmt: skip
        request.unlink()
        config.unlink()

    def kubeconfig(self, name: str, server: str, path: Path) -> None:
        """Write a kubeconfig that holds the certificates themselves."""

        def inline(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": server, "certificate-authority-data": inline("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": inline(f"{name}.crt"),
                        "client-key-data": inline(f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps(document, indent=2))


def create_all(cluster: layout.Layout, nodes: int, port: int) -> None:
    """Everything that the control plane and the nodes need."""
    authority = Authority(cluster.pki)
    authority.create()
    domain = layout.CLUSTER_DOMAIN
    authority.issue(
        "apiserver",
        "kube-apiserver",
        hosts=(
            "kubernetes", "kubernetes.default", "kubernetes.default.svc",
            f"kubernetes.default.svc.{domain}", "localhost", "127.0.0.1",
            layout.CONTROL_IP, layout.SERVICE_API_IP,
        ),
    )  # fmt: skip
    authority.issue("apiserver-kubelet", "kube-apiserver", "system:masters")
    authority.issue("front-proxy", "front-proxy")
    authority.issue("admin", "admin", "system:masters")
    outside, inside = f"https://127.0.0.1:{port}", f"https://{layout.CONTROL_IP}:6443"
    authority.kubeconfig("admin", outside, cluster.kubeconfig)
    users = {
        "controller-manager": "system:kube-controller-manager",
        "scheduler": "system:kube-scheduler",
        "proxy": "system:kube-proxy",
        "kube-router": "system:kube-router",
    }
    for name, user in users.items():
        authority.issue(name, user)
        authority.kubeconfig(name, inside, cluster.config / f"{name}.kubeconfig")
    for index in range(nodes + 1):
        create_node(cluster, index)


def create_node(cluster: layout.Layout, index: int) -> None:
    """Certificate and kubeconfig of one kubelet."""
    authority = Authority(cluster.pki)
    name = layout.node_name(index)
    hosts = (name, layout.node_ip(index), "127.0.0.1")
    authority.issue(name, f"system:node:{name}", "system:nodes", hosts)
    server = f"https://{layout.CONTROL_IP}:6443"
    authority.kubeconfig(name, server, cluster.config / f"{name}.kubeconfig")
