"""Check that an engine will run a configuration as written.

Pure, and takes a millisecond: keys and types against the checked-in table, then the rules for what the engine
would silently accept.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.recipes.ai_toolkit import rules as ai_toolkit_rules
from core.recipes.axolotl import rules as axolotl_rules
from core.recipes.kohya import rules as kohya_rules
from core.recipes.schema import ConfigMapping, check_keys, engine_table, find_secrets


def validate(engine: Engine, config: ConfigMapping, *, gpus: int, flux: bool = False) -> list[Problem]:
    """Find every problem; `flux` chooses between kohya's two trainers."""
    if engine is Engine.AXOLOTL:
        table = axolotl_rules.axolotl_table(config)
        problems = check_keys(table, table.facts["root"], config, axolotl_rules.AXOLOTL_HINTS)
        problems += _rule_problems(problems, axolotl_rules.axolotl_rules(config, gpus))
    elif engine is Engine.KOHYA:
        table = engine_table(engine)
        root = table.facts["roots"]["flux" if flux else "sdxl"]
        problems = check_keys(table, root, config, kohya_rules.KOHYA_HINTS)
        problems += _rule_problems(problems, kohya_rules.kohya_rules(config, gpus, flux))
    elif engine is Engine.AI_TOOLKIT:
        table = engine_table(engine)
        problems = check_keys(table, table.facts["root"], config, ai_toolkit_rules.AI_TOOLKIT_HINTS)
        problems += _rule_problems(problems, ai_toolkit_rules.ai_toolkit_rules(config, gpus))
    else:
        raise ValueError(f"{engine} has no configuration of its own: the native trainer reads the plan")
    return [*problems, *find_secrets(config)]


def _rule_problems(known: list[Problem], rules: Iterable[Problem]) -> list[Problem]:
    """Rules rely on correct types: after a wrong one they may fail, and the known problems must do."""
    try:
        return list(rules)
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError):
        if not known:
            raise
        return []
