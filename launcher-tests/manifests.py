"""Checks the manifests for Kubernetes in src/examples/jobs, without a cluster.

    manifests.py CONVOKE            checks them, and that e2e/pods.json is what they say
    manifests.py CONVOKE --write    writes e2e/pods.json anew

Each resource is validated as a whole: unknown fields, wrong types and missing fields are refused. The schemas of
Kubernetes come from the package kubernetes-validate, those of TrainJob and JobSet from kubeflow-trainer-api, those of
PyTorchJob from kubeflow-training (without its dependencies). No package has a schema of Volcano's Job: VOLCANO_JOB is ours.
Each command that starts convoke must parse. e2e/pods.json has the pods that the controllers make of the manifests. The tests
in e2e/kubernetes_manifests.rs run these pods. Needs PyYAML too.
"""

import ast
import copy
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml
from kubeflow_trainer_api import models as trainer

VERSION = "1.31"
BUILT_IN = {"v1", "batch/v1"}
JOBS = Path(__file__).parent.parent / "src/examples/jobs"
PODS = Path(__file__).parent / "e2e/pods.json"
# The end of the names of the namespace `default`.
CLUSTER = "default.svc.cluster.local"

# --- schemas -----------------------------------------------------------------------------------------

POD_TEMPLATE = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
META = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
TEXT, TRUTH = {"type": "string"}, {"type": "boolean"}
# What each resource in a file must have.
RESOURCE = {"required": ["apiVersion", "kind", "metadata", "spec"], "properties": {"metadata": {"required": ["name"]}}}


def fields(required="", **properties):
    """Returns the schema of an object that has no other fields."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def whole(least=0):
    return {"type": "integer", "minimum": least}


def many(item, least=0):
    return {"type": "array", "items": item, "minItems": least}


def volcano_job():
    """Returns the schema of batch.volcano.sh/v1alpha1 Job, from the fields of volcano-sh/volcano of August 2026."""
    event = {
        "enum": "* PodPending PodRunning PodFailed PodEvicted Unknown TaskCompleted OutOfSync CommandIssued JobUpdated TaskFailed".split()
    }
    policies = many(fields(action=TEXT, event=event, events=many(event), exitCode=whole(), timeout=TEXT))
    topology = fields(highestTierAllowed=whole(), highestTierName=TEXT, mode={"enum": ["hard", "soft"]})
    partitions = fields(
        "totalPartitions partitionSize",
        totalPartitions=whole(1),
        partitionSize=whole(1),
        minPartitions=whole(),
        networkTopology=topology,
    )
    task = fields(
        "template",
        name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        replicas=whole(),
        minAvailable=whole(),
        template=POD_TEMPLATE,
        policies=policies,
        maxRetry=whole(),
        dependsOn=fields(name=many(TEXT), iteration=TEXT),
        topologyPolicy={"enum": ["none", "best-effort", "restricted", "single-numa-node"]},
        partitionPolicy=partitions,
    )
    claim = {"$ref": "#/$defs/io.k8s.api.core.v1.PersistentVolumeClaimSpec"}
    spec = fields(
        "tasks",
        schedulerName=TEXT,
        minAvailable=whole(),
        minSuccess=whole(1),
        tasks=many(task, 1),
        volumes=many(fields("mountPath", mountPath=TEXT, volumeClaimName=TEXT, volumeClaim=claim)),
        policies=policies,
        plugins={"type": "object", "additionalProperties": many(TEXT)},
        queue=TEXT,
        maxRetry=whole(),
        ttlSecondsAfterFinished=whole(),
        priorityClassName=TEXT,
        runningEstimate=TEXT,
        networkTopology=topology,
    )
    return {"VolcanoJob": fields(apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec)}


def trainer_schemas(model):
    """Returns the schemas of a model of kubeflow-trainer-api, which by itself ignores unknown fields."""
    schema = model.model_json_schema(by_alias=True)
    schemas = schema.pop("$defs") | {model.__name__: schema}
    for inner in schemas.values():
        if "properties" in inner:
            inner["additionalProperties"] = False
        # null is no value of a field, and would hide the reason of a refusal.
        for value in inner.get("properties", {}).values():
            kinds = [one for one in value.pop("anyOf", []) if one != {"type": "null"}]
            value.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})
    # The model is a wrapper of both types.
    schemas["IoK8sApimachineryPkgApiResourceQuantity"] = {"type": ["string", "number"]}
    return schemas


def training_schemas():
    """Returns the schemas of kubeflow-training from the source of its models, whose import needs a client of Kubernetes."""
    schemas = {}
    models = importlib.metadata.distribution("kubeflow-training").locate_file("kubeflow/training/models")
    for path in Path(models).glob("kubeflow_org_v1_*.py"):
        (model,) = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
        told = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in model.body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("openapi_types", "attribute_map")
        }
        names = told["attribute_map"]
        # `__init__` sets a required attribute in any case, and the others if they are given.
        (init,) = (node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        always = {node.targets[0].attr for node in init.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)}
        required = sorted(names[name] for name in always & set(names))
        properties = {names[name]: training_type(kind) for name, kind in told["openapi_types"].items() if name != "status"}
        schemas[model.name] = fields(" ".join(required), **properties)
    return schemas


def training_type(kind):
    """Returns the schema of a type as the models of kubeflow-training write it."""
    known = {
        "str": TEXT,
        "int": {"type": "integer"},
        "bool": TRUTH,
        "datetime": TEXT,
        "Quantity": {"$ref": "#/$defs/io.k8s.apimachinery.pkg.api.resource.Quantity"},
        "V1LabelSelector": {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"},
        "V1ObjectMeta": META,
        "V1PodTemplateSpec": POD_TEMPLATE,
        "V1ListMeta": {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta"},
        "K8sIoApiAutoscalingV2MetricSpec": {"$ref": "#/$defs/io.k8s.api.autoscaling.v2.MetricSpec"},
    }
    if kind.startswith("list["):
        return many(training_type(kind[5:-1]))
    if kind.startswith("dict(str, "):
        return {"type": "object", "additionalProperties": training_type(kind[10:-1])}
    return known[kind] if kind in known else {"$ref": f"#/$defs/{kind}"}


def validators():
    """Returns a validator for each kind of resource that other projects define."""
    file = f"kubernetes-json-schema/v{VERSION}.0-local-strict/_definitions.json"
    definitions = kubernetes_validate.utils.schema_contents(file, VERSION)["$defs"]
    schemas = {
        ("batch.volcano.sh/v1alpha1", "Job"): ("VolcanoJob", volcano_job()),
        ("kubeflow.org/v1", "PyTorchJob"): ("KubeflowOrgV1PyTorchJob", training_schemas()),
    }
    for version, kind, model in [
        ("trainer.kubeflow.org/v1alpha1", "TrainJob", trainer.TrainerV1alpha1TrainJob),
        ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", trainer.TrainerV1alpha1TrainingRuntime),
        ("jobset.x-k8s.io/v1alpha2", "JobSet", trainer.JobsetV1alpha2JobSet),
    ]:
        schemas[version, kind] = (model.__name__, trainer_schemas(model))
    made = {}
    for resource, (name, own) in schemas.items():
        schema = {"$defs": definitions | own, "allOf": [{"$ref": f"#/$defs/{name}"}, RESOURCE]}
        made[resource] = jsonschema.Draft202012Validator(schema)
    return made


def validate(resource, others):
    """Raises jsonschema.ValidationError if the resource is not valid."""
    if resource["apiVersion"] in BUILT_IN:
        kubernetes_validate.validate(resource, VERSION, strict=True)
    else:
        others[resource["apiVersion"], resource["kind"]].validate(resource)
    for spec in pod_specs(resource):
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, VERSION, strict=True)


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


# --- mistakes that must be refused -------------------------------------------------------------------

MISSING = object()
# Kind of the resource, path of the field, wrong value. A field that is not known gets a value that no other would refuse.
MISTAKES = [
    ("Service", "spec.clusterIp", "None"),
    ("Service", "spec.publishNotReadyAddresses", "yes"),
    ("Job", "spec.completion", 4),
    ("Job", "spec.completions", "four"),
    ("Job", "spec.template", MISSING),
    ("JobSet", "spec.failurePolicy.maxRestart", 3),
    ("JobSet", "spec.failurePolicy.maxRestarts", "3"),
    ("JobSet", "spec.failurePolicy.rules.0.action", MISSING),
    ("JobSet", "spec.replicatedJobs.0.template.spec.template.spec.containers.0.comand", ["convoke"]),
    ("JobSet", "spec.replicatedJobs.0.template", MISSING),
    ("JobSet", "metadata.name", MISSING),
    ("TrainJob", "spec.runtimeref", {"name": "convoke"}),
    ("TrainJob", "spec.runtimeRef", MISSING),
    ("TrainJob", "spec.runtimeRef.name", MISSING),
    ("TrainJob", "spec.trainer.numNodes", "4"),
    ("TrainJob", "spec.trainer.commands", ["convoke"]),
    ("TrainJob", "spec.trainer.command", "convoke"),
    ("TrainingRuntime", "spec.mlPolicy.numberOfNodes", 4),
    ("TrainingRuntime", "spec.mlPolicy.torch.numProcPerNode", "auto"),
    ("TrainingRuntime", "spec.template.spec.replicatedJobs.0.name", MISSING),
    ("TrainingRuntime", "spec", MISSING),
    ("PyTorchJob", "spec.nprocPerNode", 2),
    ("PyTorchJob", "spec.nprocpernode", "auto"),
    ("PyTorchJob", "spec.pytorchReplicaSpecs", MISSING),
    ("PyTorchJob", "spec.pytorchReplicaSpecs.Worker.replicas", "3"),
    ("PyTorchJob", "spec.pytorchReplicaSpecs.Worker.template.spec.containers", MISSING),
    ("PyTorchJob", "spec.runPolicy.backOffLimit", 3),
    ("VolcanoJob", "spec.minavailable", 4),
    ("VolcanoJob", "spec.minAvailable", "4"),
    ("VolcanoJob", "spec.tasks", MISSING),
    ("VolcanoJob", "spec.tasks", []),
    ("VolcanoJob", "spec.tasks.0.template", MISSING),
    ("VolcanoJob", "spec.tasks.0.replica", 1),
    ("VolcanoJob", "spec.plugins.svc", "on"),
    ("VolcanoJob", "spec.policies", [{"event": "PodLost", "action": "RestartJob"}]),
    ("VolcanoJob", "spec.tasks.1.template.spec.restartPolicies", "OnFailure"),
]


def check_mistakes(resources, others):
    """Shows for each mistake that the valid resource with it is refused because of this field."""
    for name, path, wrong in MISTAKES:
        resource = copy.deepcopy(next(one for one in resources if kind_name(one) == name))
        *folders, field = (int(word) if word.isdigit() else word for word in path.split("."))
        place = resource
        for folder in folders:
            place = place[folder]
        if wrong is MISSING:
            del place[field]
        else:
            place[field] = wrong
        try:
            validate(resource, others)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            if wrong is MISSING:
                names_it = error.message == f"{field!r} is a required property"
            else:
                names_it = field in error.absolute_path or f"({field!r} was unexpected)" in error.message
            assert names_it, (name, path, error.message)
        else:
            raise AssertionError(f"{name} with a wrong {path} is accepted")


def kind_name(resource):
    return ("Volcano" if "volcano" in resource["apiVersion"] else "") + resource["kind"]


# --- the pods that controllers make ------------------------------------------------------------------


def pod(name, spec, subdomain, variables):
    """Returns a pod as the kubelet starts it. `variables` are those that the controller adds to the containers. A pod without a
    subdomain has a service of its own name."""
    names = [name, subdomain, CLUSTER] if subdomain else [name, CLUSTER]
    containers = []
    for container in spec.get("initContainers", []) + spec["containers"]:
        is_init = container in spec.get("initContainers", [])
        argv = container["command"] + container.get("args", [])
        assert not any("$(" in word for word in argv), "the kubelet would replace it"
        own = {one["name"]: one["value"] for one in container.get("env", [])}
        added = {name: value for name, value in variables.items() if not is_init or name == "JOB_COMPLETION_INDEX"}
        containers.append({"init": is_init, "argv": argv, "env": own | added})
    return {"name": name, "dns": ".".join(names), "has_domain": bool(subdomain), "containers": containers}


def indexed_job(name, spec, subdomain, variables=lambda index: {}):
    template = spec["template"]["spec"]
    return [
        pod(f"{name}-{index}", template, template.get("subdomain", subdomain), {"JOB_COMPLETION_INDEX": str(index)} | variables(index))
        for index in range(spec.get("completions", 1))
    ]


def job_set(name, spec, variables=lambda index: {}):
    """Returns the pods of all jobs. Without another subdomain they have the name of the set."""
    subdomain = spec.get("network", {}).get("subdomain", name)
    return [
        one
        for job in spec["replicatedJobs"]
        for number in range(job.get("replicas", 1))
        for one in indexed_job(f"{name}-{job['name']}-{number}", job["template"]["spec"], subdomain, variables)
    ]


def train_job(name, spec, runtime):
    """Returns the pods of Trainer's plugin for torch: the runtime's template with the command of the job."""
    nodes = spec["trainer"].get("numNodes", runtime["mlPolicy"]["numNodes"])
    assert "resourcesPerNode" not in spec["trainer"] and "numProcPerNode" not in spec["trainer"], "would set the workers"
    template = copy.deepcopy(runtime["template"]["spec"])
    for job in template["replicatedJobs"]:
        labels = job["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            job["template"]["spec"]["completions"] = nodes
            (node,) = (one for one in job["template"]["spec"]["template"]["spec"]["containers"] if one["name"] == "node")
            node.update({key: value for key, value in spec["trainer"].items() if key in ("image", "command", "args", "env")})

    def variables(index):
        return {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }

    return job_set(name, template, variables)


def pytorch_job(name, spec):
    """Returns the pods of the training operator 1.9, each with a service of its own."""
    replicas = spec["pytorchReplicaSpecs"]
    size = sum(one.get("replicas", 1) for one in replicas.values())
    workers = spec.get("nprocPerNode", "1")
    pods = []
    for role in ("Master", "Worker"):
        for index in range(replicas[role].get("replicas", 1)):
            rank = str(len(pods))
            place = {"MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456"}
            variables = {"PYTHONUNBUFFERED": "1", "RANK": rank, "PET_NODE_RANK": rank, "PET_NNODES": str(size)}
            variables |= place | {f"PET_{key}": value for key, value in place.items()}
            variables["WORLD_SIZE"] = str(size * (int(workers) if workers.isdigit() else 1))
            if "nprocPerNode" in spec:
                variables["PET_NPROC_PER_NODE"] = workers
            pods.append(pod(f"{name}-{role.lower()}-{index}", replicas[role]["template"]["spec"], None, variables))
    return pods


def volcano_pods(name, spec):
    """Returns the pods of Volcano with its plugins `svc` and `pytorch`."""
    assert "svc" in spec["plugins"], "pods have no names"
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in spec["plugins"]["pytorch"])
    size = sum(task["replicas"] for task in spec["tasks"])
    pods = []
    for task in spec["tasks"]:
        for index in range(task["replicas"]):
            rank = index + (task["name"] == flags["worker"])
            variables = {"MASTER_ADDR": f"{name}-{flags['master']}-0.{name}", "MASTER_PORT": flags["port"]}
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
            pods.append(pod(f"{name}-{task['name']}-{index}", task["template"]["spec"], name, variables))
    return pods


def pods_of(resources):
    """Returns the pods of one manifest."""
    pods = []
    for resource in resources:
        name, spec = resource["metadata"]["name"], resource["spec"]
        match kind_name(resource):
            case "Job":
                pods += indexed_job(name, spec, None)
            case "JobSet":
                pods += job_set(name, spec)
            case "PyTorchJob":
                pods += pytorch_job(name, spec)
            case "TrainJob":
                runtimes = {one["metadata"]["name"]: one["spec"] for one in resources if one["kind"] == "TrainingRuntime"}
                pods += train_job(name, spec, runtimes[spec["runtimeRef"]["name"]])
            case "VolcanoJob":
                pods += volcano_pods(name, spec)
    return pods


# --- commands ----------------------------------------------------------------------------------------


def check_command(convoke, argv, what):
    """Shows that the command line of a container is one of convoke's."""
    words = argv
    if words[:2] == ["sh", "-c"]:
        words = words[2].removeprefix("exec ").split()
    assert words[0] == "convoke", words
    words = [word.replace("$RANK", "1").replace("$MASTER_ADDR", "h").replace("$MASTER_PORT", "23456") for word in words[1:]]
    subcommand = words[:1] if words[0] == "check" else []
    # One pod does not know here that it has peers: node ranks come from the cluster.
    command = [convoke, *subcommand, "--dry-run", "--scheduler=none", *words[len(subcommand) :]]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, (what, words, run.stderr)


def main():
    convoke, *flags = sys.argv[1:]
    others, everything, manifests = validators(), [], []
    for path in sorted(JOBS.glob("k8s-*.yaml")):
        text = path.read_text()
        resources = list(yaml.safe_load_all(text))
        for resource in resources:
            validate(resource, others)
        pods = pods_of(resources)
        assert pods, path.name
        for argv in {tuple(one["argv"]) for each in pods for one in each["containers"]}:
            check_command(convoke, list(argv), path.name)
        everything += resources
        manifests.append({"file": path.name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "pods": pods})
    check_mistakes(everything, others)
    text = json.dumps(manifests, indent=1) + "\n"
    if flags == ["--write"]:
        PODS.write_text(text)
    assert PODS.read_text() == text, f"{PODS} is not what the manifests say: run manifests.py with --write"
    print(f"{len(everything)} resources of {len(manifests)} manifests are valid, {len(MISTAKES)} mistakes in them are refused")


main()
