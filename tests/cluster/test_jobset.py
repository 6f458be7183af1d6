"""examples/cluster/jobset.yaml: as its schema says, and its command makes a run on this machine.

The lies: a manifest with a field that Kubernetes has not, which it ignores or refuses on the day; a
coordinator whose name no pod has; flags that `multitower train` does not have.
"""

import copy
import importlib.util
import subprocess
import sys

import pytest
import yaml

from circle_run import EXAMPLES, TRAIN, result, undisturbed_fingerprint
from processes import clean_environment, free_port

MANIFEST = yaml.safe_load((EXAMPLES / "cluster" / "jobset.yaml").read_text())


def job_of(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_of(manifest):
    return job_of(manifest)["template"]["spec"]


def container_of(manifest):
    return pod_of(manifest)["containers"][0]


def flags_of(manifest):
    words = container_of(manifest)["command"]
    return dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))


def through_the_schema(manifest):
    """What is left of a manifest in the models of JobSet and Kubernetes."""
    if importlib.util.find_spec("kubeflow_trainer_api") is None:
        install = "pip install -r requirements/cluster-python3.X.txt"
        pytest.fail(f"no kubeflow_trainer_api here: {install}", pytrace=False)
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest)).to_dict()


def fits_the_schema(manifest):
    try:
        return through_the_schema(manifest) == manifest  # fields that it does not know are gone
    except ValueError:
        return False  # a field has a value of another kind, or one that must be there is missing


def test_the_schema_knows_every_field():
    assert fits_the_schema(MANIFEST)


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        (lambda m: m, "metadata", "metaData"),
        (lambda m: m["spec"], "failurePolicy", "restartPolicy"),
        (lambda m: m["spec"]["failurePolicy"], "maxRestarts", "maxRestart"),
        (lambda m: m["spec"]["network"], "subdomain", "subDomain"),
        (job_of, "completionMode", "completionmode"),
        (job_of, "backoffLimit", "backOffLimit"),
        (pod_of, "terminationGracePeriodSeconds", "terminationGracePeriod"),
        (pod_of, "volumes", "volume"),
        (lambda m: pod_of(m)["volumes"][0]["persistentVolumeClaim"], "claimName", "name"),
        (lambda m: pod_of(m)["securityContext"], "runAsNonRoot", "runAsNonroot"),
        (container_of, "command", "cmd"),
        (lambda m: container_of(m)["resources"], "limits", "limit"),
        (lambda m: container_of(m)["volumeMounts"][0], "mountPath", "path"),
    ],
)
def test_a_misspelt_field_is_found(part, right, wrong):
    manifest = copy.deepcopy(MANIFEST)
    fields = part(manifest)
    fields[wrong] = fields.pop(right)
    assert not fits_the_schema(manifest)


@pytest.mark.parametrize("value", ["2", 2.5, [2], True])
def test_a_number_that_is_none_is_found(value):
    manifest = copy.deepcopy(MANIFEST)
    job_of(manifest)["parallelism"] = value
    with pytest.raises(ValueError, match="parallelism"):
        through_the_schema(manifest)


def test_pods_processes_and_names_agree():
    job, pod, container, flags = (
        part(MANIFEST) for part in (job_of, pod_of, container_of, flags_of)
    )
    assert job["completionMode"] == "Indexed"  # else there is no JOB_COMPLETION_INDEX
    assert job["parallelism"] == job["completions"] == int(flags["num-processes"])
    assert flags["process-id"] == "$(JOB_COMPLETION_INDEX)"
    replicated = MANIFEST["spec"]["replicatedJobs"][0]
    assert replicated["replicas"] == 1
    network = MANIFEST["spec"]["network"]
    pod_0 = f"{MANIFEST['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
    host, _, port = flags["coordinator"].partition(":")
    assert host == pod_0
    assert int(port) == container["ports"][0]["containerPort"]
    # A pod that fails, fails the job; only then does the JobSet start all of them anew.
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    assert MANIFEST["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert flags["resume"] == "auto"
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_the_run_is_on_the_shared_volume():
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(MANIFEST)["volumeMounts"]}
    claims = [v["name"] for v in pod_of(MANIFEST)["volumes"] if "persistentVolumeClaim" in v]
    assert len(claims) == 1
    assert flags_of(MANIFEST)["run-dir"].startswith(f"{mounts[claims[0]]}/")
    assert {volume["name"] for volume in pod_of(MANIFEST)["volumes"]} == set(mounts)


def test_the_command_makes_a_run_on_this_machine(tmp_path):
    flags, port = flags_of(MANIFEST), free_port()
    here = {
        "multitower": [sys.executable, "-m", "multitower"],
        "digits": TRAIN.split(),
        f"--towers={flags['towers']}": [],  # TRAIN says them
        f"--run-dir={flags['run-dir']}": [f"--run-dir={tmp_path}"],
        f"--coordinator={flags['coordinator']}": [f"--coordinator=127.0.0.1:{port}"],
    }
    words = container_of(MANIFEST)["command"]
    assert set(here) <= set(words)
    words = [word for given in words for word in here.get(given, [given])]
    running = [
        subprocess.Popen(
            [*(w.replace("$(JOB_COMPLETION_INDEX)", str(i)) for w in words), "--simulate=1"],
            env=clean_environment(KUBERNETES_SERVICE_HOST="127.0.0.1"),  # as in every pod
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(job_of(MANIFEST)["completions"])
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [process.returncode for process in running] == [0, 0], errors
    assert result(tmp_path)["processes"] == 2
    assert result(tmp_path)["fingerprint"] == undisturbed_fingerprint()
