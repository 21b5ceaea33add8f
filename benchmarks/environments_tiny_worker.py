"""Runs inside the training environment: a little model made on the spot, a whole container's run, and games.

    training-python -m benchmarks.environments_tiny_worker '{"games": ["leduc_poker"], "hours": 0.3, …}'

One JSON line per game.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from core.runs.run_files import RunResult
from trainer.environments.match import INTERRUPTED, MatchResult, MatchRules, play_match
from trainer.environments.play import ModelOptions, entry_for
from trainer.environments.selfplay import GameSource

MODEL, TASK, REPOSITORY = "0123456789abcdef", "tiny", "tournament-tiny-tiny-5Gabc"
WINDOW, VOCABULARY = 4096, 2000
END, TURN = "<|endoftext|>", "<|im_end|>"
SPECIAL = [END, "<|im_start|>", TURN, "<tool_call>", "</tool_call>"]
#: Of a model that knows nothing yet: small steps in number, large in size.
PROFILE: dict[str, Any] = {
    "extends": "cpu-native",
    "sections": {
        "environment": {
            "targets": {
                "method": "full",
                "micro_batch_size": 8,
                "gradient_accumulation_steps": 1,
                "learning_rate": 2e-3,
                "max_steps": 2000,
                "warmup_steps": 50,
                "eval_steps": 200,
                "save_steps": 200,
                "val_rows_max": 32,
            },
            "limits": {"max_steps": 2000, "max_micro_batch": 8},
        }
    },
}


def main(asked: dict[str, Any]) -> None:
    for game in asked["games"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_case(Path(folder), game, asked["hours"], asked["played"])), flush=True)


def _case(folder: Path, game: str, hours: float, played: int) -> dict[str, Any]:
    params = make_model(folder / "cache" / "models" / MODEL, game)
    began, before = time.time(), os.times()
    code = _train(folder, game, hours)
    seconds, after = time.time() - began, os.times()
    result = RunResult.model_validate_json((folder / "work" / TASK / "result.json").read_bytes())
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    said = {"game": game, "params": params, "exit": code, "wall": seconds, "cpu": cpu, "steps": result.steps}
    submission = folder / "out" / TASK / REPOSITORY
    against = [_played(submission, game, opponent, played) for opponent in ("random", "mcts:50")]
    return {**said, "loss": result.best.value if result.best else None, "against": against}


def make_model(folder: Path, game: str) -> int:
    """A random model, and a vocabulary of the game's own texts: a usual one has more rows than weights."""
    from axolotl.utils.chat_templates import get_chat_template

    source = GameSource(game)
    source.get_ready()
    texts = [
        json.dumps(row["messages"]) + str(row["tools"]) for seed in range(60) for row in source.rows(seed)
    ]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=TURN, pad_token=END, model_max_length=WINDOW
    )
    tokenizer.chat_template = get_chat_template("qwen_25")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN),
        pad_token_id=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters())


def _train(folder: Path, game: str, hours: float) -> int:
    """Start the container as a validator does, except for the paths of its volumes."""
    profile = folder / "profile.yaml"
    profile.write_text(yaml.safe_dump(PROFILE), encoding="utf-8")
    code = (
        "import sys; from pathlib import Path; from trainer.runner import command_line as line; "
        f"line.CACHE, line.CHECKPOINTS = Path({str(folder / 'cache')!r}), Path({str(folder / 'out')!r}); "
        "from trainer.text import main; sys.exit(main())"
    )
    options = ["--task-id", TASK, "--model", MODEL, "--dataset", "https://example.com/rows.json"]
    options += ["--dataset-type", json.dumps({"environment_names": [game]}), "--task-type", "EnvTask"]
    options += ["--file-format", "s3", "--expected-repo-name", REPOSITORY, "--hours-to-complete", str(hours)]
    more = {"GOD_MINER_WORK": str(folder / "work"), "GOD_MINER_PROFILE": str(profile)}
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        env={**os.environ, **more},
        stdout=sys.stderr,
        check=False,
    )
    return done.returncode


def _played(model: Path, game: str, opponent: str, played: int) -> dict[str, Any]:
    """Pairs of games; a match that the evaluator would stop is followed by one with other seeds."""
    options = ModelOptions()
    ours, theirs = entry_for(str(model), options), entry_for(opponent, options)
    total, number = MatchResult(game, (ours.name, theirs.name)), 0
    while total.games < played:
        number += 1
        rules = MatchRules(seconds=1e9, games=played - total.games, base_seed=number, at_once=8)
        result = play_match(
            game, lambda: (ours.contestant(ours.name), theirs.contestant(theirs.name)), rules, lambda *_: None
        )
        if result.failure:
            raise RuntimeError(result.failure)
        if result.ended == INTERRUPTED:
            raise KeyboardInterrupt
        total.wins, total.draws = total.wins + result.wins, total.draws + result.draws
        total.losses += result.losses
        total.forfeits[0].update(result.forfeits[0])
    forfeits = {str(kind): count for kind, count in total.forfeits[0].items()}
    return {"opponent": opponent, "games": total.games, "score": total.score, "forfeits": forfeits}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
