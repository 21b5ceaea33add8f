from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.job_states import EndReason, StepFailed
from core.domain.tasks import TaskType
from tests.core.submission import folders
from tests.core.submission.folders import validators_hash
from tests.miner.publish.conftest import REPO, Bench

pytestmark = [
    pytest.mark.process,
    pytest.mark.usefixtures("here"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.fixture
def shelf(bench: Bench) -> Path:
    return bench.folder / "hub"


async def test_a_folder_gets_the_same_files_and_the_same_hash_as_the_hub(bench: Bench, shelf: Path) -> None:
    online = await bench.publish()
    local = await bench.publish(bench.publisher(hub=f"local:{shelf}", token=None))
    assert local == online
    place = shelf / "tester" / REPO
    names = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert names == set(bench.there())
    assert validators_hash(place) == online.model_hash


async def test_a_better_one_takes_the_place_whole_and_what_is_published_is_a_copy(
    bench: Bench, shelf: Path
) -> None:
    publisher = bench.publisher(hub=f"local:{shelf}", token=None, user=None)
    await bench.publish(publisher)
    made = await bench.publish(publisher, folder=folders.full(bench.folder / "full"))
    place = shelf / "local" / REPO
    assert not (place / "adapter_config.json").exists()
    assert validators_hash(place) == made.model_hash
    assert made.repo == f"local/{REPO}"
    (bench.folder / "full" / "model.safetensors").write_bytes(b"changed")
    assert validators_hash(place) == made.model_hash
    assert [path.name for path in place.parent.iterdir()] == [REPO]


async def test_a_move_is_a_rename_and_may_be_repeated(bench: Bench, shelf: Path) -> None:
    publisher = bench.publisher(hub=f"local:{shelf}", token=None)
    earlier = await bench.publish(publisher)
    moved = await publisher.move(earlier, "second")
    assert await publisher.move(earlier, "second") == moved
    assert validators_hash(shelf / "tester" / "second") == moved.model_hash == earlier.model_hash
    with pytest.raises(StepFailed, match="is not in"):
        await publisher.move(earlier, "third")


async def test_images_lie_where_they_do_on_the_hub(bench: Bench, shelf: Path) -> None:
    publisher = bench.publisher(hub=f"local:{shelf}", token=None)
    await bench.publish(publisher, folder=folders.image(bench.folder / "i"), task_type=TaskType.IMAGE)
    assert (shelf / "tester" / REPO / "checkpoint" / "last.safetensors").is_file()


async def test_a_bad_submission_leaves_what_is_published(bench: Bench, shelf: Path) -> None:
    publisher = bench.publisher(hub=f"local:{shelf}", token=None)
    made = await bench.publish(publisher)
    (bench.submission / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(StepFailed) as caught:
        await bench.publish(publisher)
    assert caught.value.reason is EndReason.BAD_SUBMISSION
    assert validators_hash(shelf / "tester" / REPO) == made.model_hash


async def test_a_folder_that_cannot_be_written_is_reported(bench: Bench) -> None:
    (bench.folder / "file").write_text("x")
    publisher = bench.publisher(hub=f"local:{bench.folder}/file/hub", token=None, tries=1)
    with pytest.raises(StepFailed, match="Not a directory"):
        await bench.publish(publisher)


async def test_a_folder_needs_no_account(bench: Bench, shelf: Path) -> None:
    about = await bench.publisher(hub=f"local:{shelf}", token=None, user=None).account()
    assert (about.owner, about.may_write) == ("local", True)
