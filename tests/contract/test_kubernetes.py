"""The Kubernetes adapters against the fake API server: what they send, and what they make of its answers."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.errors import SchedulerError
from edl.job_records import SchedulerChoice
from edl.schedulers.kubernetes import open_scheduler
from edl.schedulers.kubernetes.client import ApiTarget
from tests.contract.kubernetes_fixture import CASES, RULES, SET, TOKEN, Case, every_kind, run, setup
from tests.kubernetes_fake import kinds
from tests.kubernetes_fake.server import Fault, Server
from tests.kubernetes_fake.store import Json

# --- asking ----------------------------------------------------------------------------------------------------------


@every_kind
def test_sizes_are_read_and_changed(case: Case, tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(case, tmp_path) as here:
            assert (await here.scheduler.current()).nodes == 2
            await here.scheduler.request(4, "the test wants it")
            assert case.sizes(here.store) == {4} and (await here.scheduler.current()).nodes == 4
            patches = len(here.sent("patch"))
            await here.scheduler.request(4, "again")
            await here.scheduler.request(1, "never fewer")
            assert len(here.sent("patch")) == patches, "what holds already is not sent again"
            await here.scheduler.release(["a"], 1, "the test wants it")
            assert case.sizes(here.store) == {1} and (await here.scheduler.current()).nodes == 1
            await here.scheduler.release(["a"], 1, "the answer was lost")
            await here.scheduler.release(["a"], 3, "never more")
            assert len(here.sent("patch")) == patches + 1
            assert here.scheduler.indexed == case.indexed
            assert here.scheduler.ask_none_at_end == case.ask_none_at_end

    run(story())


@every_kind
def test_somebody_else_is_faster(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each patch names the version it was made for: a change in between is read, not overwritten."""

    async def story() -> None:
        async with setup(case, tmp_path) as here:
            entry = here.store.get(case.resource, "default", "train")

            def meddle() -> None:
                entry["metadata"]["annotations"] = {"changed": str(here.store.version)}
                entry["metadata"].pop("resourceVersion", None)
                here.store.update(case.resource, "default", entry)

            client, tries = here.scheduler._client, 0
            patch = client.patch

            async def late(target: ApiTarget, body: object, content_type: str) -> Json:
                nonlocal tries
                tries += 1
                if tries <= 2:
                    meddle()
                return await patch(target, body, content_type)

            with monkeypatch.context() as changed:
                changed.setattr(client, "patch", late)
                await here.scheduler.request(3, "test")
            assert tries == 3 and case.sizes(here.store) == {3}
            here.server.faults.append(Fault(409, ["patch"]))
            with pytest.raises(SchedulerError, match="changed by others 5 times") as caught:
                await here.scheduler.request(4, "test")
            assert caught.value.retry

    run(story())


def test_the_highest_indexes_are_released_and_no_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, controllers=True) as here:
            await here.scheduler.request(4, "test")
            with pytest.raises(SchedulerError, match="with 3 pods left it keeps and restarts train-0") as caught:
                await here.scheduler.release(["train-0"], 3, "drained")
            assert not caught.value.retry and SET.sizes(here.store) == {4}
            await here.scheduler.release(["train-3", "train-2"], 2, "drained")
            assert SET.sizes(here.store) == {2}
            await here.scheduler.release(["train-0", "train-1"], 0, "the job is over")
            assert SET.sizes(here.store) == {0}
            assert (await here.scheduler.current()).nodes == 0, "0 is left out of a Scale"

    run(story())


@pytest.mark.parametrize("case", [SET, CASES[-1]], ids=lambda case: case.kind)
def test_an_object_of_somebody_else_is_not_scaled_to_none(case: Case, tmp_path: Path) -> None:
    """A slip in --scheduler must not end another job when this one ends."""

    async def story() -> None:
        async with setup(case, tmp_path) as here:
            before = case.sizes(here.store)
            with pytest.raises(SchedulerError, match=r"not scaled to 0: none .*other-0, train") as caught:
                await here.scheduler.release(["other-0", "train"], 0, "the job has ended")
            assert not caught.value.retry and case.sizes(here.store) == before
            await here.scheduler.release(["other-0", "train-1-0a1b"], 0, "the job has ended")
            assert case.sizes(here.store) == {0}

    run(story())


def test_a_set_with_a_longer_name_is_another_one() -> None:
    conf = {"api": "https://127.0.0.1:1"}
    scheduler = open_scheduler(SchedulerChoice("statefulset", "train", conf))
    with pytest.raises(SchedulerError, match="is not scaled to 0"):
        run(scheduler.release(["train-b-0", "train-b-1"], 0, "the job has ended"))


def test_a_volcano_job_keeps_what_it_needs_at_least(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(CASES[2], tmp_path) as here:

            def least() -> int:
                return int(here.store.get(kinds.VOLCANO_JOBS, "default", "train")["spec"]["minAvailable"])

            await here.scheduler.request(6, "test")
            assert least() == 2, "what is beyond stays optional"
            await here.scheduler.release([], 1, "test")
            assert least() == 2
            entry = here.store.get(kinds.VOLCANO_JOBS, "default", "train")
            entry["spec"]["tasks"] = [{**entry["spec"]["tasks"][1], "name": "trainer", "replicas": 4}]
            entry["spec"]["minAvailable"] = 4
            here.store.checks.clear()
            here.store.update(kinds.VOLCANO_JOBS, "default", entry)
            await here.scheduler.release([], 3, "test")
            assert least() == 3, "never more than there are"

    run(story())


def test_objects_that_cannot_be_resized(tmp_path: Path) -> None:
    async def story(case: Case, change: Callable[[Json], None], text: str) -> None:
        async with setup(case, tmp_path) as here:
            entry = here.store.get(case.resource, "default", "train")
            change(entry)
            here.store.checks.clear()
            here.store.update(case.resource, "default", entry)
            with pytest.raises(SchedulerError, match=text) as caught:
                await here.scheduler.request(3, "test")
            assert not caught.value.retry

    over = [{"type": "Complete", "status": "True"}]
    run(story(CASES[1], lambda job: job["spec"].pop("completionMode"), "only Indexed can resize"))
    run(story(CASES[1], lambda job: job["status"].update(conditions=over), "has ended .Complete."))
    tasks = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
    run(story(CASES[2], lambda job: job["spec"].update(tasks=tasks), "no task worker .tasks: a, b."))
    run(story(CASES[3], lambda job: job["spec"].pop("worker"), "has no spec.worker"))


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_missing_rule_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            here.server.accounts[TOKEN] = [rule for rule in RULES if "statefulsets/scale" not in rule["resources"]]
            with pytest.raises(SchedulerError) as caught:
                await here.scheduler.current()
            text = str(caught.value)
            assert not caught.value.retry
            assert 'cannot get resource "statefulsets/scale" in API group "apps"' in text, "the server's own words"
            assert '{apiGroups: ["apps"], resources: ["statefulsets/scale"], verbs: [get, patch]}' in text
            here.server.accounts[TOKEN] = [rule for rule in RULES if "pods" not in rule["resources"]]
            size = await here.scheduler.current()
            assert size.nodes == 2 and size.there == -1
            assert '{apiGroups: [""], resources: ["pods"], verbs: [get, list, watch]}' in size.detail

    run(story())


def test_no_such_object(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            here.store.remove(kinds.STATEFUL_SETS, "default", "train")
            with pytest.raises(SchedulerError, match="Check the name, and that the namespace is default") as caught:
                await here.scheduler.request(3, "test")
            assert not caught.value.retry

    run(story())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(status: int, tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            fault = Fault(status, times=3)
            here.server.faults.append(fault)
            await here.scheduler.request(3, "test")
            assert fault.hits == 3 and SET.sizes(here.store) == {3}

    run(story())


def test_retry_after_is_kept_to_and_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            here.server.faults.append(Fault(429, times=1, retry_after=1))
            begin_s = asyncio.get_running_loop().time()
            await here.scheduler.current()
            assert asyncio.get_running_loop().time() - begin_s >= 1
            here.server.faults[:] = [Fault(429, retry_after=3600)]
            with pytest.raises(SchedulerError, match="injected 429") as caught:
                await here.scheduler.current()
            assert caught.value.retry

    run(story())


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path, timeout="0.3") as here:
            here.server.faults.append(Fault(0))
            for call in (here.scheduler.current(), here.scheduler.request(3, "test")):
                with pytest.raises(SchedulerError, match=r"no answer within 0\.3 s") as caught:
                    await call
                assert caught.value.retry
            await here.server.stop()
            with pytest.raises(SchedulerError, match="Kubernetes GET") as caught:
                await here.scheduler.current()
            assert caught.value.retry

    run(story())


def test_the_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            await here.scheduler.current()
            here.server.accounts.clear()
            here.server.accounts["a new one"] = RULES
            with pytest.raises(SchedulerError, match="is not accepted") as caught:
                await here.scheduler.current()
            assert caught.value.retry
            here.token_file.with_suffix(".new").write_text("a new one")
            here.token_file.with_suffix(".new").replace(here.token_file)
            assert (await here.scheduler.current()).nodes == 2
            here.token_file.unlink()
            assert (await here.scheduler.current()).nodes == 2, "the last one, while the file is being replaced"

    run(story())


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl program")
def test_tls_with_the_clusters_own_authority(tmp_path: Path) -> None:
    certificate, key = tmp_path / "ca.crt", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *subject, *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def story() -> None:
        async with setup(SET, tmp_path) as here:
            secure = Server(here.store, {TOKEN: RULES})
            conf = {"api": await secure.start(context), "namespace": "default", "token_file": str(here.token_file)}
            trusting = open_scheduler(SchedulerChoice("statefulset", "train", {**conf, "ca": str(certificate)}))
            distrusting = open_scheduler(SchedulerChoice("statefulset", "train", {**conf, "timeout": "0.5"}))
            try:
                assert (await trusting.current()).nodes == 2
                with pytest.raises(SchedulerError, match="certificate"):
                    await distrusting.current()
            finally:
                await trusting.close()
                await distrusting.close()
                await secure.stop()

    run(story())
