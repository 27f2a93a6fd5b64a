"""What a support bundle masks, and what it leaves readable."""

from __future__ import annotations

import base64

import pytest

from backstay_cli.bundle.mask import MASK, Masker, looks_secret


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *(
            "BACKSTAY_TOKEN",
            "secretKey",
            "accessKey",
            "my.api-key",
            "GOOGLE_CREDENTIALS",
            "authToken",
        ),
        *("PRIVATE_KEY", "SLACK_WEBHOOK_SECRET", "npm_auth"),
    ],
)
def test_names_that_look_like_a_secrets_are_seen(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "OMP_NUM_THREADS",
            "credentialsSecret",
            "secretName",
            "caSecret",
            "TOKENIZERS_PARALLELISM",
        ),
        *("AUTHOR", "keepLast", "topologyKey", "monkey", "NUM_KEYS", "message"),
    ],
)
def test_ordinary_names_are_left(name: str) -> None:
    assert not looks_secret(name)


def test_environment_is_masked_by_its_names_wherever_it_stands() -> None:
    env = [{"name": "HF_TOKEN", "value": "abc"}, {"name": "EPOCHS", "value": "3"}]
    pod = {"spec": {"containers": [{"name": "trainer", "env": env}]}}
    told = Masker().tree(pod)["spec"]["containers"][0]["env"]
    assert told == [{"name": "HF_TOKEN", "value": MASK}, {"name": "EPOCHS", "value": "3"}]


def test_what_follows_an_option_of_such_a_name_is_masked() -> None:
    told = Masker().tree(["train.py", "--api-key", "hunter22", "--steps", "5", "--hub-token=abc"])
    assert told == ["train.py", "--api-key", MASK, "--steps", "5", f"--hub-token={MASK}"]


def test_known_secrets_are_masked_everywhere_in_base64_too() -> None:
    masker = Masker(["0123456789abcdef"])
    coded = base64.b64encode(b"0123456789abcdef").decode()
    text = masker.text(f"x0123456789abcdefy and {coded}")
    assert text == f"x{MASK}y and {MASK}"
    assert masker.tree({"message": ["got 0123456789abcdef"]}) == {"message": [f"got {MASK}"]}


def test_data_of_secrets_and_copies_of_the_manifest_are_left_out() -> None:
    last = {"kubectl.kubernetes.io/last-applied-configuration": "{...}", "note": "hello"}
    tree = {
        "kind": "Secret",
        "metadata": {"annotations": last, "managedFields": [{"manager": "kubectl"}]},
        "data": {"password": "aGVsbG8=", "user": "YW5u"},
    }
    told = Masker().tree(tree)
    assert told["data"] == {"password": MASK, "user": MASK}
    assert told["metadata"] == {"annotations": {"note": "hello"}}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ("http://s3/b/k?X-Amz-Signature=deadbeef&X-Amz-Expires=60", "deadbeef"),
        ("using key AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        ("cloning https://ann:hunter22@git.example.org/x", "hunter22"),
        ("export WANDB_API_KEY=12ab34cd", "12ab34cd"),
        ('{"password": "hunter22"}', "hunter22"),
        ("--hub-token hunter22=x token=hunter22", "token=hunter22"),
        ("env: [{name: MY_API_KEY, value: hunter22}]", "hunter22"),
        ("- name: HF_TOKEN\n  value: 'hunter22'\n", "hunter22"),
        ('{"name": "DB_PASSWORD", "value": "hunter22"}', "hunter22"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
    ],
)
def test_forms_that_are_a_secret_by_themselves_are_masked(text: str, masked: str) -> None:
    told = Masker().text(text)
    assert masked not in told
    assert MASK in told


@pytest.mark.parametrize(
    "text",
    [
        "step 1200 loss=0.25 tokens=4096 token: 12.5",
        "- name: EPOCHS\n  value: 3",
        "step 1200 of attempt 1796000000000001 is durable",
        "keepLast: 2, topologyKey: topology.kubernetes.io/zone",
        "checkpoints/000000001200-001796000000000001/00000.safetensors",
    ],
)
def test_what_training_says_stays_readable(text: str) -> None:
    assert Masker().text(text) == text
