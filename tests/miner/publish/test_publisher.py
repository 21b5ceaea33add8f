"""The real client against the hub's stand-in: what is published, what is replaced, what is moved."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from miner.publish.messages import PublishOrder, PublishTask
from miner.publish.publisher import UploadSpeed, publish_environment
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, write
from tests.miner.publish.conftest import REPO, Bench, workers

#: The client's own use of its own client.
pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]


async def test_an_adapter_is_published_whole_mended_public_and_with_a_validators_hash(bench: Bench) -> None:
    made = await bench.publish()
    assert made.repo == f"tester/{REPO}"
    assert made.model_hash == bench.hash_of()
    there = bench.there()
    assert set(there) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    config = json.loads(bytes(there["adapter_config.json"].content))  # type: ignore[arg-type]
    assert config["base_model_name_or_path"] == BASE_ID
    assert not bench.hub.repo(made.repo).private
    assert any("left out: debug.log" in text for text in bench.noted)
    assert any("mended: adapter_config.json" in text for text in bench.noted)
    assert bench.reported[-1] == ("upload", bench.reported[-1][2], bench.reported[-1][2])
    assert bench.reported[0][0] == "check"
    assert workers() == [], "no process is left behind"


@pytest.mark.usefixtures("here")
@pytest.mark.kept("3")
@pytest.mark.parametrize("parts", [1, 3])
async def test_a_full_model_is_published_with_the_hash_of_all_its_parts(bench: Bench, parts: int) -> None:
    made = await bench.publish(folder=folders.full(bench.folder / "full", parts=parts))
    assert made.model_hash == bench.hash_of()
    assert len([name for name in bench.there() if name.endswith(".safetensors")]) == parts


@pytest.mark.usefixtures("here")
async def test_an_image_model_lies_where_evaluators_look(bench: Bench) -> None:
    image = folders.image(bench.folder / "image", "last-000004.safetensors")
    made = await bench.publish(folder=image, task_type=TaskType.IMAGE, model_path=bench.base / "config.json")
    assert set(bench.there()) == {"README.md", "checkpoint/last.safetensors"}
    assert made.model_hash == bench.hash_of()


@pytest.mark.usefixtures("here")
async def test_a_better_model_replaces_the_earlier_one_in_one_commit(bench: Bench) -> None:
    publisher = bench.publisher()
    earlier = await bench.publish(publisher)
    repo = bench.hub.repo(earlier.repo)
    commits = len(repo.commits)
    full = folders.full(bench.folder / "full", parts=2)
    write(full, {"tokenizer.json": {"version": "1.0"}})
    taken = bench.hub.bytes_taken("PUT /upload")
    better = await bench.publish(publisher, folder=full, earlier=earlier)
    assert better.repo == earlier.repo
    assert better.model_hash == bench.hash_of() != earlier.model_hash
    assert len(repo.commits) == commits + 1
    assert "adapter_config.json" not in bench.there()
    assert bench.hub.bytes_taken("PUT /upload") > taken


@pytest.mark.usefixtures("here")
async def test_what_is_there_already_is_not_sent_again_and_makes_no_commit(bench: Bench) -> None:
    publisher = bench.publisher()
    first = await bench.publish(publisher)
    commits = len(bench.hub.repo(first.repo).commits)
    taken = bench.hub.bytes_taken("PUT /upload")
    assert await bench.publish(publisher) == first
    assert len(bench.hub.repo(first.repo).commits) == commits
    assert bench.hub.bytes_taken("PUT /upload") == taken


@pytest.mark.usefixtures("here")
async def test_a_repository_that_was_there_before_is_emptied_of_other_things(bench: Bench) -> None:
    bench.hub.add(f"tester/{REPO}", {"old/model.bin": b"x", ".gitattributes": b"y"})
    await bench.publish()
    assert "old/model.bin" not in bench.there()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("is_empty", [True, False])
async def test_only_an_empty_private_repository_is_opened(bench: Bench, is_empty: bool) -> None:
    files = {".gitattributes": b"y"} if is_empty else {"mine.bin": b"x", ".gitattributes": b"y"}
    bench.hub.add(f"tester/{REPO}", files, private=True)
    if is_empty:
        await bench.publish()
    else:
        with pytest.raises(StepFailed, match="private and not empty") as caught:
            await bench.publish()
        assert caught.value.reason is EndReason.HUB_REFUSED
        assert set(bench.there()) == {"mine.bin"}
    assert bench.hub.repo(f"tester/{REPO}").private is not is_empty


@pytest.mark.usefixtures("here")
async def test_without_a_user_the_tokens_own_is_asked_once(bench: Bench) -> None:
    publisher = bench.publisher(user=None)
    for _ in range(2):
        assert (await bench.publish(publisher)).repo == f"tester/{REPO}"
    assert len(bench.hub.lines("whoami")) == 1


@pytest.mark.usefixtures("here")
async def test_an_organisation_may_be_the_owner(bench: Bench) -> None:
    bench.hub.orgs["guild"] = {"roleInOrg": "write"}
    made = await bench.publish(bench.publisher(user="guild"))
    assert made.repo == f"guild/{REPO}"
    assert set(bench.there(owner="guild")) >= {"adapter_model.safetensors"}


@pytest.mark.usefixtures("here")
async def test_a_card_that_the_hub_refuses_does_not_cost_the_submission(bench: Bench) -> None:
    write(bench.base, {"README.md": "---\nlicense: home-made-1.0\n---\n"})
    await bench.publish()
    assert b"license" not in bytes(bench.there()["README.md"].content)  # type: ignore[arg-type]
    assert any("a plain one takes its place" in text for text in bench.noted)


@pytest.mark.usefixtures("here")
async def test_a_bad_submission_is_reported_before_the_hub_is_asked_anything(bench: Bench) -> None:
    (bench.submission / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(StepFailed, match=r"adapter_model\.safetensors: has 4 bytes") as caught:
        await bench.publish()
    assert caught.value.reason is EndReason.BAD_SUBMISSION
    assert bench.hub.requests == []


@pytest.mark.usefixtures("here")
async def test_links_out_of_the_folder_are_never_uploaded(bench: Bench) -> None:
    secret = write(bench.folder / "out", {"key": "the secret of this machine"}) / "key"
    (bench.submission / "tokenizer.json").unlink()
    (bench.submission / "tokenizer.json").symlink_to(secret)
    await bench.publish()
    assert "tokenizer.json" not in bench.there()
    assert any("tokenizer.json" in text and "no links" in text for text in bench.noted)


@pytest.mark.usefixtures("here")
async def test_a_move_renames_and_sends_nothing(bench: Bench) -> None:
    publisher = bench.publisher()
    earlier = await bench.publish(publisher)
    taken = bench.hub.bytes_taken("PUT /upload")
    moved = await publisher.move(earlier, "second-name")
    assert moved == MinerSubmission(repo="tester/second-name", model_hash=earlier.model_hash)
    assert bench.hash_of("second-name") == earlier.model_hash
    assert bench.hub.bytes_taken("PUT /upload") == taken
    assert await publisher.move(earlier, "second-name") == moved
    assert await publisher.move(moved, "second-name") == moved


@pytest.mark.usefixtures("here")
async def test_a_move_over_something_else_is_refused(bench: Bench) -> None:
    publisher = bench.publisher()
    earlier = await bench.publish(publisher)
    bench.hub.add("tester/taken", {"config.json": b"{}"})
    with pytest.raises(StepFailed, match="exists already, with other content") as caught:
        await publisher.move(earlier, "taken")
    assert caught.value.reason is EndReason.HUB_REFUSED


@pytest.mark.usefixtures("here")
async def test_publishing_under_another_name_takes_what_is_there_along(bench: Bench) -> None:
    publisher = bench.publisher()
    earlier = await bench.publish(publisher)
    taken = bench.hub.bytes_taken("PUT /upload")
    made = await bench.publish(publisher, repo_name="second-name", earlier=earlier)
    assert made.repo == "tester/second-name"
    assert bench.hub.bytes_taken("PUT /upload") == taken
    assert f"tester/{REPO}" not in bench.hub.repos


@pytest.mark.usefixtures("here")
async def test_a_file_is_read_once_however_often_it_is_published(bench: Bench) -> None:
    publisher = bench.publisher()
    first = await bench.publish(publisher)
    memory = bench.folder / "state" / "1.json"
    known = json.loads(memory.read_bytes())
    weights = (bench.submission / "adapter_model.safetensors").read_bytes()
    sha256 = hashlib.sha256(weights).hexdigest()
    assert sha256 in [fact["sha256"] for fact in known["files"].values()]
    # Were it read again, this would be found out.
    memory.write_bytes(memory.read_bytes().replace(sha256.encode(), b"0" * 64))
    with pytest.raises(StepFailed):
        await bench.publish(publisher, repo_name="other")
    publisher.forget(1)
    assert not memory.exists()
    assert (await bench.publish(publisher, repo_name="other")).model_hash == first.model_hash


@pytest.mark.usefixtures("here")
async def test_a_token_shows_whose_it_is_and_what_it_may(bench: Bench) -> None:
    about = await bench.publisher(user=None).account()
    assert (about.user, about.owner, about.may_write) == ("tester", "tester", True)
    bench.hub.roles["tester"] = {"role": "read"}
    assert not (await bench.publisher().account()).may_write
    assert not (await bench.publisher(user="stranger").account()).may_write
    scope = {"entity": {"type": "user", "name": "tester"}, "permissions": ["repo.content.read"]}
    bench.hub.roles["tester"] = {"role": "fineGrained", "fineGrained": {"scoped": [scope]}}
    assert "repo.write" in (await bench.publisher().account()).detail
    scope["permissions"] = ["repo.write"]
    assert (await bench.publisher().account()).may_write


def test_the_daemon_does_not_load_the_client() -> None:
    code = "import sys, miner.publish; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


async def test_deduplicated_content_is_published_and_verified_too(bench: Bench, tmp_path: Path) -> None:
    bench.hub.deduplicated = tmp_path / "store"
    made = await bench.publish()
    assert made.model_hash is not None
    assert bench.hub.lines("PUT /upload") == []
    weights = (bench.submission / "adapter_model.safetensors").read_bytes()
    assert bench.there()["adapter_model.safetensors"].sha256 == hashlib.sha256(weights).hexdigest()


async def test_a_hub_without_deduplication_gets_plain_uploads_at_the_first_try(bench: Bench) -> None:
    await bench.publish(bench.publisher(tries=1))
    assert bench.hub.lines("PUT /upload")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("/no/such/program",), "cannot be started"),
        ((sys.executable, "-c", "import sys; sys.exit(7)"), "status 7"),
        ((sys.executable, "-c", 'print(\'{"event":"note","text":"x"}\')'), "no answer"),
    ],
)
async def test_a_process_without_an_answer_is_a_failure_that_may_pass(
    bench: Bench, command: tuple[str, ...], text: str
) -> None:
    with pytest.raises(StepFailed, match=text) as caught:
        await bench.publisher(worker=command).account()
    assert caught.value.reason is EndReason.NETWORK


def test_the_process_gets_no_secret_and_keeps_its_files_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    environment = publish_environment(tmp_path, deduplicate=False)
    assert "secret" not in environment.values()
    assert environment["HTTPS_PROXY"] == "http://proxy:3128"
    assert (environment["HF_HOME"], environment["HF_HUB_DISABLE_XET"]) == (str(tmp_path), "1")
    assert "hf_x" not in repr(PublishOrder(task=PublishTask.ACCOUNT, token="hf_xxxx"))


def paced(
    finish_by: float | None, *seen: tuple[float, int], total: int = 100_000_000
) -> tuple[list[str], UploadSpeed]:
    """What is reported of an upload that was at these bytes at these times."""
    now, reported = 0.0, list[str]()
    speed = UploadSpeed(finish_by, lambda: now, reported.append)
    for at, done in seen:
        now = at
        speed.add(done, total)
    return reported, speed


@pytest.mark.parametrize(
    ("finish_by", "seen"),
    [
        (100, [(0, 0), (5, 10_000_000), (10, 20_000_000)]),
        (10, [(0, 0), (2, 1000)]),
        (None, [(0, 0), (50, 1000)]),
    ],
    ids=["in time", "the first seconds", "no deadline"],
)
def test_nothing_is_said_of_an_upload_that_may_be_in_time(
    finish_by: float | None, seen: list[tuple[float, int]]
) -> None:
    assert paced(finish_by, *seen)[0] == []


def test_an_upload_that_will_be_late_is_reported_once_with_the_numbers() -> None:
    (report,), _ = paced(50, (0, 0), (5, 5_000_000), (10, 10_000_000))
    assert report == "the upload will not be done in time: 95 MB to go at 1.0 MB/s, and 45 s are left"
    assert len(paced(100, (0, 5), (5, 5), (10, 5))[0]) == 1, "one that stands still is late as well"


def test_one_that_catches_up_is_reported_too() -> None:
    seen = [(float(n), n * 1_000_000) for n in range(20)]
    seen += [(20.0 + n, 20_000_000 + n * 8_000_000) for n in range(10)]
    (late, well), _ = paced(60, *seen)
    assert "not be done" in late
    assert "in time after all" in well


def test_another_try_begins_anew() -> None:
    assert paced(1000, (0, 0), (10, 90), (11, 0), (15, 40), total=100)[1].speed == 10
