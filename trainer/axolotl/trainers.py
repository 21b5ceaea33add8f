"""Axolotl's trainers for preferences and for GRPO, with the evaluation's tokens.

Named in the configuration as `trainer_cls`, so Axolotl builds them with everything of its own. What they
change is where tokens come from: TRL 1.9 encodes prompt and answer as one text and adds special tokens,
which is what one generation of evaluation does and the other does not (`core.domain.evaluation`). GRPO's also
makes steps cheaper.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from peft import PeftModel
from torch import nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from trainer.axolotl.answer_logits import SelectiveHead
from trainer.axolotl.prompt_kl import PROMPT_COUNTS, prompt_counts
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.rewards.calls import RewardCalls, RewardWatch
from trainer.rewards.source import REWARD_MODULE
from trainer.scoring.completions import complete
from trainer.scoring.forward import Predicted, log_probs
from trainer.scoring.sampling import SamplingRules

#: What TRL logs of a pass with preferences, where our loss computes it; means over this process's pairs.
PAIR_METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


class AnswerTokens(NamedTuple):
    """Flat positions before the answers' tokens in a batch of pairs, and these tokens."""

    places: torch.Tensor
    tokens: torch.Tensor


class PairTrainer(AxolotlDPOTrainer):  # type: ignore[misc]
    """Takes the pairs as `trainer.inputs` encoded and cut them, and computes logits of their answers only.

    TRL computes those of prompts and padding too, and goes through all of them again for what it logs: the
    entropy, the mean, the likeliest token, each of which waits for the GPU. Other losses are left to TRL."""

    #: Of the model and of the base.
    _heads: dict[Any, SelectiveHead]
    #: `PAIR_METRICS` of each pass since the last log.
    pair_means: list[torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # TRL computes the base's probabilities while it is made.
        self._heads, self.pair_means = {}, []
        super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        missing = set(PAIR_COLUMNS) - set(dataset.column_names)
        if missing:
            raise ValueError(f"the {dataset_name} data is not encoded: no {', '.join(sorted(missing))}")
        return dataset

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        if not (model.training and self._loss_is_plain):
            return super()._compute_loss(model, inputs, return_outputs)
        answers = following(inputs)
        own = self._answer_sums(model, inputs, answers)
        if self.precompute_ref_logps:
            base = torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        else:
            base = self._base_sums(self.ref_model or self.model, inputs, answers)
        chosen, rejected = (self.beta * (own - base)).chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        self.pair_means.append(_pair_means(chosen.detach(), rejected.detach(), own.detach()))
        return (loss, {}) if return_outputs else loss

    @property
    def _loss_is_plain(self) -> bool:
        """Return True if the loss needs only the sums of the answers' log-probs."""
        sigmoid = self.loss_types == ["sigmoid"] and self.loss_weights == [1.0]
        plain = self.f_divergence_type == "reverse_kl" and self.ld_alpha is None and not self.use_weighting
        return sigmoid and plain and not self.aux_loss_enabled and self._heads_see_positions

    @property
    def _heads_see_positions(self) -> bool:
        return not (self.args.torch_compile or self._is_vlm or self.model.get_output_embeddings() is None)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """TRL calls this for what it computes before the first step."""
        if self.ld_alpha is not None or not self._heads_see_positions:
            return super().compute_ref_log_probs(model, inputs)
        return self._base_sums(model, inputs, following(inputs)).chunk(2)

    def _base_sums(self, model: Any, inputs: Any, answers: AnswerTokens) -> torch.Tensor:
        adapted: Any = nullcontext()
        unwrapped = self.accelerator.unwrap_model(self.model)
        if self.ref_model is None and isinstance(unwrapped, PeftModel):
            adapted = use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None)
        checkpointing = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, checkpointing), adapted:
            return self._answer_sums(model, inputs, answers)

    def _answer_sums(self, model: Any, inputs: Any, answers: AnswerTokens) -> torch.Tensor:
        """Log p of each answer: of all chosen ones, then of all rejected ones."""
        if model not in self._heads:
            self._heads[model] = SelectiveHead(self.accelerator.unwrap_model(model))
        head, ids = self._heads[model], inputs["input_ids"]
        others = {key: value for key, value in inputs.items() if key not in _PAIRS_OWN}
        with head.at(ids.shape, answers.places):
            logits = head.logits_at(model(**others, use_cache=False).logits)
        by_token = log_probs(Predicted(logits, answers.tokens, answers.places))
        # Not added up by row: on a GPU the order of such sums varies from run to run.
        return by_token.new_zeros(ids.numel()).index_copy(0, answers.places, by_token).view_as(ids).sum(dim=1)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.pair_means and self.model.training:
            means = torch.stack(self.pair_means).mean(dim=0).tolist()
            named = {name: [mean] for name, mean in zip(PAIR_METRICS, means, strict=True)}
            self._metrics["train"].update(named)
            self.pair_means.clear()
        super().log(logs, start_time)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Skip the garbage collection and emptied cache after each micro step: both wait for the GPU."""
        return super(AxolotlDPOTrainer, self).training_step(*args, **kwargs)


#: What a batch of pairs holds beside the model's arguments.
_PAIRS_OWN = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")


def following(inputs: Mapping[str, torch.Tensor]) -> AnswerTokens:
    ids, mask = inputs["input_ids"], inputs["completion_mask"]
    places = torch.nn.functional.pad(mask[:, 1:], (0, 1)).flatten().nonzero().flatten()
    return AnswerTokens(places, ids.flatten()[places + 1])


def _pair_means(chosen: torch.Tensor, rejected: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """`PAIR_METRICS` of one pass."""
    right, margins = (chosen > rejected).float(), chosen - rejected
    return torch.stack([values.mean() for values in (chosen, rejected, right, margins, *sums.chunk(2))])


class PromptTrainer(AxolotlGRPOTrainer):  # type: ignore[misc]
    """GRPO with what a step costs cut, and the same gradients: our sampling, the task's rewards beside other
    work, and passes no wider than the completions in them."""

    #: Completions that are generated at once, if not all of a step.
    together: int | None = None
    #: Notices rewards that teach nothing.
    watch: RewardWatch | None = None
    #: Whether the loss has a KL on prompts.
    with_prompt_kl = False

    #: While it is open, a failure is the generation's. Where the model generates itself it opens its own.
    generating: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    _rows: list[dict[str, Any]]
    _calls: RewardCalls | None = None
    #: Of the current generation: one batch for each pass.
    _buffered_inputs: Any
    #: Whether its completions were handed to `_calls`.
    _handed_in = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self._rows, self._handed_in = inputs, False
        if self._calls is None and all(map(_is_tasks, self.reward_funcs)):
            self._calls = RewardCalls(self.reward_funcs)
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> Any:
        began = time.monotonic()
        rules = self._sampling_rules()
        if self.use_vllm:
            with self.generating():
                completions, log_probs = self._by_vllm(prompt_ids, images, multimodal_fields)
        elif rules is None or images is not None:
            completions, log_probs = super()._generate_single_turn(prompt_ids, images, multimodal_fields)
        else:
            completions, log_probs = self._complete(prompt_ids, rules), None
        self._generated_s = time.monotonic() - began
        if self._calls is not None and self._takes_texts:
            self._calls.hand_in(*self._scored(range(len(completions)), completions))
            self._handed_in = True
        return completions, log_probs

    def _by_vllm(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> Any:
        """With the weights as they are. TRL hands them over once for each number of a step, which neither a
        vLLM that has slept nor steps that were taken back have."""
        self._last_loaded_step = None
        with fresh_weights(self.vllm_generation):
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields)

    def _sampling_rules(self) -> SamplingRules | None:
        """Return the sampling rules, or None if our sampling lacks a requested one."""
        more = self.args.generation_kwargs or self.args.cache_implementation
        odd = self.top_p != 1.0 or self.min_p or self.repetition_penalty != 1.0
        if self.use_vllm or self.use_transformers_continuous_batching or more or odd:
            return None
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id or 0
        longest = self.max_completion_length
        return SamplingRules(self.temperature, self.top_k or 0, longest, () if end is None else (end,), pad)

    def _complete(self, prompt_ids: list[list[int]], rules: SamplingRules) -> list[list[int]]:
        prompts, times = _grouped(prompt_ids, self.num_generations)
        calls = self._calls if self._calls is not None and self._calls.any_slow else None

        def finished(prompt: int, completions: list[list[int]]) -> None:
            assert calls is not None
            calls.hand_in_early(*self._scored(range(prompt * times, (prompt + 1) * times), completions))

        # From torch's own generator: it is restored with a checkpoint, and after a search for a rate.
        seed = int(torch.randint(1 << 62, (1,)))
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with self.accelerator.autocast():
            return complete(
                model,
                prompts,
                times,
                rules,
                seed,
                together=self.together,
                finished=finished if calls is not None and self._takes_texts else None,
            )

    @property
    def _takes_texts(self) -> bool:
        """Conversations and the like are left to TRL."""
        return isinstance(self._rows[0]["prompt"], str)

    def _scored(
        self, rows: Sequence[int], completions: list[list[int]]
    ) -> tuple[Sequence[int], list[str], dict[str, list[Any]]]:
        """The rows, their completions as texts, and the columns that reward functions get."""
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        asked = [self._rows[row] for row in rows]
        columns = {name: [row[name] for row in asked] for name in asked[0] if name not in _OWN_COLUMNS}
        columns |= {"prompts": [row["prompt"] for row in asked], "completion_ids": completions}
        return rows, texts, columns

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        if self._calls is None or not self._handed_in:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        else:
            numbers = self._calls.collect(self._generated_s)
            own = torch.tensor(numbers, dtype=torch.float32, device=self.accelerator.device).T
            rewards = gather(own.contiguous())
        if self.watch is not None and self.model.training:
            self.watch.add(rewards.tolist(), self.num_generations)
        return rewards

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Order completions by length: if one generation is one step and each completion counts by itself,
        any order gives the same gradients. TRL shuffles them, and pads all passes to the longest prompt and
        the longest completion."""
        parts = self.args.steps_per_generation
        if not self._cuts_by_length():
            return super()._prepare_inputs(generation_batch)
        if self._step % parts == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = by_length(batch, parts, self.with_prompt_kl)
        return self._buffered_inputs[self._step % parts]

    def _cuts_by_length(self) -> bool:
        one_step = self.args.steps_per_generation == self.args.gradient_accumulation_steps
        means = self.top_entropy_quantile < 1.0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        neutral = self.loss_type in ORDERLESS_LOSSES and not means
        return bool(self.model.training and self.num_iterations == 1 and one_step and neutral)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **more: Any,
    ) -> Any:
        """Without the entropy of every token, which nothing here uses: it is a pass over the vocabulary. What
        is logged in its place has the same mean."""
        entropy = compute_entropy and (self.top_entropy_quantile < 1.0 or self._entropy_bonus_enabled)
        compute = super()._get_per_token_logps_and_entropies
        pictures = any(value is not None for key, value in more.items() if key != "compute_aux_loss")
        # The policy's are compared with the reference's at every position: both are cut alike, or none is.
        if pictures or batch_size is None or compute_entropy or not self._cuts_by_length():
            named = {"batch_size": batch_size, "compute_entropy": entropy, **more}
            log_probs, entropies, loss = compute(model, input_ids, attention_mask, logits_to_keep, **named)
            return log_probs, entropies if entropy else -log_probs.detach(), loss
        gathered = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        for rows in attention_mask.sum(dim=1).argsort(descending=True, stable=True).split(batch_size):
            ids, mask, kept = _narrow(input_ids[rows], attention_mask[rows], logits_to_keep)
            gathered[rows, :kept] = compute(model, ids, mask, kept)[0].float()
        return gathered, None, None


class RawPromptTrainer(PromptTrainer):
    """Encodes prompts without special tokens, as the evaluation of offers does."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if not all(isinstance(prompt, str) for prompt in prompts):
            return super()._tokenize_prompts(prompts)
        ids = self.processing_class(text=prompts, add_special_tokens=False)["input_ids"]
        return ids, None, {}


#: TRL's losses to which a completion adds the same whatever else is in its pass. The others divide by the
#: tokens of a pass (bnpo) or by its width (luspo).
ORDERLESS_LOSSES = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
#: Columns that TRL gives to rewards under another name.
_OWN_COLUMNS = ("prompt", "completion", "completion_ids")


def _is_tasks(reward: Any) -> bool:
    """Return True if it calls the task's own code in its process. An operator's function may be a coroutine
    or a model, and may want all that TRL passes to one (`trainer_state`, `log_metric`), in TRL's thread."""
    return getattr(reward, "__module__", None) == REWARD_MODULE


def _grouped(prompt_ids: list[list[int]], most: int) -> tuple[list[list[int]], int]:
    """Prompts that follow each other as often as all others, each once, and how often, at `most`: two equal
    prompts of the data are two."""
    runs = [len(list(run)) for _, run in groupby(prompt_ids)]
    times = math.gcd(*runs, most)
    return prompt_ids[::times], times


def _narrow(ids: Any, mask: Any, completion: int) -> tuple[Any, Any, int]:
    """Without the columns in which no row has a token, before the prompts and behind the completions."""
    prompt = ids.shape[1] - completion
    before = int(mask[:, :prompt].sum(dim=1).max())
    kept = max(int(mask[:, prompt:].sum(dim=1).max()), 1)
    columns = slice(prompt - before, prompt + kept)
    return ids[:, columns], mask[:, columns], kept


def by_length(batch: Mapping[str, Any], parts: int, with_prompt_kl: bool = False) -> list[dict[str, Any]]:
    """A generation's completions in equal parts, longest first, each without columns that it does not need.
    Memory runs out in the first part or in none; with a KL on prompts, in the first or the last."""
    prompts, completions = batch["prompt_mask"], batch["completion_mask"]
    order = (prompts.sum(dim=1) + completions.sum(dim=1)).argsort(descending=True, stable=True)
    if with_prompt_kl:
        batch = {**batch, PROMPT_COUNTS: prompt_counts(batch["prompt_ids"], prompts, order)}
    return [_part(batch, rows) for rows in order.view(parts, -1)]


def _part(batch: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    width = batch["completion_mask"].shape[1]
    before = int(batch["prompt_mask"][rows].sum(dim=1).max())
    kept = max(int(batch["completion_mask"][rows].sum(dim=1).max()), 1)

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            return value
        if not isinstance(value, torch.Tensor):
            return [value[row] for row in rows.tolist()]
        own = value[rows]
        if key in ("prompt_ids", "prompt_mask"):
            return own[:, own.shape[1] - before :]
        return own[:, :kept] if own.ndim == 2 and own.shape[1] == width else own

    return {key: cut(key, value) for key, value in batch.items()}


#: The method by which vLLM reads the base model's files again.
_RELOAD = "reload_weights"


@contextlib.contextmanager
def fresh_weights(generation: Any) -> Iterator[None]:
    """Hand our weights to a vLLM in this process that sleeps between generations.

    Two habits of TRL 1.9's `VLLMGeneration` are replaced while this is open. It hands over the weights and
    then lets vLLM read the base's files again (trl #5312): the completions are the untrained model's. And it
    merges adapters into the base and takes them out again (#6688), which in bf16 leaves the base a little
    different at every step. Here files are read before our weights come, and adapters are added to copies.

    Written for a model that is whole on its GPU. Not run with a vLLM yet, which needs a GPU.
    """
    llm = getattr(generation, "llm", None)
    if llm is None:  # vLLM is a server: it does not sleep
        yield
        return
    sync, call = generation.sync_weights, llm.collective_rpc

    def read_then_sync() -> None:
        if generation.enable_sleep_mode:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            llm.wake_up(tags=["weights"])
            # Sleeping loses what is no weight too, such as tables of positions.
            with contextlib.suppress(NotImplementedError):
                call(_RELOAD)
        adapted = merged_weights(generation.model)
        if adapted is None:
            sync()
            return
        for name, weight in adapted:
            generation._push_param_to_vllm(generation._fix_param_name_to_vllm(name), weight)
        llm.reset_prefix_cache()

    def without_reload(method: Any, *arguments: Any, **named: Any) -> Any:
        return None if method == _RELOAD else call(method, *arguments, **named)

    generation.sync_weights, llm.collective_rpc = read_then_sync, without_reload
    try:
        yield
    finally:
        del generation.sync_weights, llm.collective_rpc


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]] | None:
    """Names without peft's parts, and weights with their adapters added in fp32, one after the other. None
    for a model without adapters, and for one that TRL has to hand over: sharded, quantised, or with adapters
    on something other than linear layers."""
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    plain = all(type(layer.get_base_layer()) is nn.Linear for layer in adapted.values())
    sharded = any(type(weight).__name__ == "DTensor" for weight in model.parameters())
    saved = any("modules_to_save" in name for name, _ in model.named_modules())
    return _merged(model, adapted) if adapted and plain and not sharded and not saved else None


def _merged(model: Any, adapted: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if model.prefix in name:
                continue
            layer_name, _, last = name.rpartition(".base_layer.")
            value = weight.data
            if last == "weight":
                layer = adapted[layer_name]
                added = sum(layer.get_delta_weight(active).float() for active in layer.active_adapters)
                value = (value.float() + added).to(value.dtype)
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), value
