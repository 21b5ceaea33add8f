from miner.store.events import _OLD_REFUSALS
from miner.store.store import Store
from tests.miner.store.rows import rows


async def test_pruning_scans_shared_refusals_alone(store: Store) -> None:
    plan = rows(store, f"EXPLAIN QUERY PLAN {_OLD_REFUSALS}".replace("?", "1"))
    assert any("ix_decisions_shared" in row["detail"] for row in plan)
    assert not any("B-TREE" in row["detail"] for row in plan)
