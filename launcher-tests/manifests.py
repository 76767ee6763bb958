"""Checks the manifests for Kubernetes in src/examples/jobs, without a cluster.

    manifests.py CONVOKE

Services and jobs of Kubernetes itself are validated strictly as a whole. For resources of other projects the templates
of their pods are. Each command that starts convoke must parse. Needs the packages kubernetes-validate and PyYAML.
"""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

VERSION = "1.31"
BUILT_IN = {"v1", "batch/v1"}
JOBS = Path(__file__).parent.parent / "src/examples/jobs"


def pod_specs(value):
    """Yields each spec that has containers, below any key."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        else:
            for inner in value.values():
                yield from pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pod_specs(inner)


def commands(resource):
    """Yields each command of a container, and of a TrainJob's trainer, as words after `convoke`."""
    found = [resource["spec"]["trainer"]] if "trainer" in resource["spec"] else []
    found += [container for spec in pod_specs(resource) for container in spec.get("initContainers", []) + spec["containers"]]
    for container in found:
        words = container.get("command", [])
        if words[:2] == ["sh", "-c"]:
            words = container["args"][0].removeprefix("exec ").split()
        if words:
            assert words[0] == "convoke", words
            yield [word.replace("$RANK", "1").replace("$MASTER_ADDR", "h").replace("$MASTER_PORT", "23456") for word in words[1:]]


def main():
    checked = 0
    for path in sorted(JOBS.glob("k8s-*.yaml")):
        for resource in yaml.safe_load_all(path.read_text()):
            if resource["apiVersion"] in BUILT_IN:
                kubernetes_validate.validate(resource, VERSION, strict=True)
            for spec in pod_specs(resource):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
                kubernetes_validate.validate(pod, VERSION, strict=True)
            for words in commands(resource):
                subcommand = words[:1] if words[0] == "check" else []
                words = words[len(subcommand) :]
                command = [sys.argv[1], *subcommand, "--dry-run", "--scheduler=none", *words]
                run = subprocess.run(command, capture_output=True, text=True, check=False)
                # One pod does not know here that it has peers: node ranks come from the cluster.
                assert run.returncode == 0, (path.name, words, run.stderr)
                checked += 1
    assert checked >= 8, checked
    print(f"{checked} commands and their pods are valid")


main()
