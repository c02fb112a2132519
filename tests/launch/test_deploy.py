"""What is in deploy/ says what Kubernetes and our own commands understand. It is not run here."""

from __future__ import annotations

import configparser
import ipaddress
import shlex
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.cli import torchrun
from everstep.cli.main import command_tree

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="no schemas; pip install .[dev]")
yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = DEPLOY / "kubernetes.yaml"
VERSIONS = ("1.29", "1.33")


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def the(kind: str) -> Any:
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", documents(), ids=lambda d: d["kind"])
def test_every_object_fits_the_schema_with_no_unknown_field(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    broken = the("StatefulSet")
    broken["spec"]["replica"] = broken["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def check_options(command: str, words: list[str]) -> None:
    """They are options that this command of ours has, and no token is among them."""
    ours = {name for each in command_tree(command).commands[command].params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= ours
    assert "--token" not in words


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_the_options_are_ours(kind: str) -> None:
    (container,) = the(kind)["spec"]["template"]["spec"]["containers"]
    program, command, *words = container["args"]
    assert program == "everstep"
    check_options(command, words)


def secrets_of(container: dict[str, Any], pod: dict[str, Any]) -> set[str]:
    """The secrets that processes of this container can read."""
    volumes = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    mounted = {volumes[one["name"]] for one in container.get("volumeMounts", ()) if one["name"] in volumes}
    values = [one.get("valueFrom", {}).get("secretKeyRef") for one in container.get("env", ())]
    return mounted | {value["name"] for value in values if value}


def test_the_token_of_an_admin_is_the_coordinators_alone() -> None:
    """Every agent had it, and workers run beside their agent: any job could have ended all others."""
    pod = the("StatefulSet")["spec"]["template"]["spec"]
    (coordinator,) = pod["containers"]
    assert secrets_of(coordinator, pod) == {"everstep-admin", "everstep-tls"}
    pod = the("DaemonSet")["spec"]["template"]["spec"]
    (agent,), (first,) = pod["containers"], pod["initContainers"]
    assert secrets_of(agent, pod) == {"everstep-ca"}
    assert secrets_of(first, pod) == {"everstep-nodes"}
    node = next(
        one["valueFrom"]["fieldRef"]["fieldPath"] for one in first["env"] if one["name"] == "NODE_NAME"
    )
    *_, source, target = first["command"]
    assert (node, source) == ("spec.nodeName", "/tokens/$(NODE_NAME).token")
    words = agent["args"]
    assert words[words.index("--token-file") + 1] == target
    assert words[words.index("--node") + 1] == "$(NODE_NAME)"


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_secrets_are_copied_so_that_their_user_alone_can_read_them(kind: str) -> None:
    """What our commands refuse otherwise; and it is the same user that copies and reads."""
    pod = the(kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    (first,) = pod["initContainers"]
    assert first["command"][:3] == ["install", "-m", "600"]
    for container in (first, *pod["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["image"].rpartition(":")[2] == everstep.__version__


def test_the_policy_says_who_may_reach_the_coordinator() -> None:
    """Without `from` it allowed everybody, which is what there is without a policy."""
    policy = the("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= the("StatefulSet")["metadata"]["labels"].items()
    for rule in policy["ingress"]:
        assert rule["ports"] == [{"port": 7077, "protocol": "TCP"}]
        assert rule["from"]
        assert all(peer for peer in rule["from"])
        blocks = [peer["ipBlock"]["cidr"] for peer in rule["from"] if "ipBlock" in peer]
        assert blocks, "agents use the network of their hosts: selectors of pods do not match them"
        assert all(ipaddress.ip_network(block).prefixlen >= 16 for block in blocks)


@pytest.mark.parametrize("file", ["jobset.yaml", "kubeflow.yaml", "skypilot.yaml"])
def test_a_run_has_a_secret_that_nobody_can_derive(file: str) -> None:
    text = (DEPLOY / file).read_text()
    (document,) = yaml.safe_load_all(text)
    assert "openssl rand -hex 32" in text, "how it is made"
    if file == "skypilot.yaml":
        assert document["secrets"] == {"EVERSTEP_TOKEN": None}, "its own command line must give it"
        return
    spec = document["spec"] if file == "jobset.yaml" else document["spec"]["template"]["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (token,) = [one for one in pod["containers"][0]["env"] if one["name"] == "EVERSTEP_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "everstep-run", "key": "token"}
    assert "create secret generic everstep-run --from-literal=token=" in text


@pytest.mark.parametrize("name", ["coordinator", "agent"])
def test_the_units_run_our_commands_with_our_options(name: str) -> None:
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read(DEPLOY / f"everstep-{name}.service")
    _, command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert command == name
    check_options(command, words)
    assert unit["Service"]["Restart"] == "always"


def test_agents_call_the_coordinator_by_a_name_that_its_service_gives_it() -> None:
    (agent,) = the("DaemonSet")["spec"]["template"]["spec"]["containers"]
    address = agent["args"][agent["args"].index("--coordinator") + 1]
    stateful, service = the("StatefulSet"), the("Service")
    port = service["spec"]["ports"][0]["port"]
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert address == f"https://{stateful['metadata']['name']}-0.{service['metadata']['name']}:{port}"
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("jobset.yaml", "JobsetV1alpha2JobSet"),
        ("kubeflow.yaml", "TrainerV1alpha1ClusterTrainingRuntime"),
    ],
)
def test_runtimes_fit_the_schemas_that_kubeflow_publishes(file: str, model: str) -> None:
    """A field that the schema does not know is lost when the manifest is read and written back."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    (document,) = yaml.safe_load_all((DEPLOY / file).read_text())
    read = getattr(models, model).from_dict(document)
    assert read.to_dict() == document


@pytest.mark.parametrize("file", ["jobset.yaml", "kubeflow.yaml", "skypilot.yaml"])
def test_the_command_of_a_script_is_one_that_torchrun_would_take(file: str) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / file).read_text())
    if file == "skypilot.yaml":
        words = shlex.split(document["run"].replace("\\\n", " "))
    else:
        spec = document["spec"] if file == "jobset.yaml" else document["spec"]["template"]["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        words = pod["containers"][0]["command"]
    given = torchrun.parse(words[3:])
    assert words[:3] == ["python", "-m", "everstep.run"]
    assert given.training_script == "train.py"


def test_skypilot_reads_its_file() -> None:
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    config = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    config["secrets"] = {"EVERSTEP_TOKEN": "given by --secret"}
    assert sky.Task.from_yaml_config(config).num_nodes == 2
