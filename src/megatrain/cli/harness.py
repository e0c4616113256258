"""The command `lm-eval`: tasks of lm-evaluation-harness with a model larger than the device.

The harness is a package of its own (`pip install lm_eval`) and does everything but the model: it
reads the tasks, cuts and counts, and prints the table. Its model `megatrain` is made here, over the
streamed engine.

Law (proofs/harness.py, where the harness is installed): every log-likelihood, every generated text
and every score is that of its own model `hf`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, MissingPackage

NAME = "megatrain"
_OURS = ("--model", "-M", "--model_args", "-a", "--batch_size", "-b")
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
_POSITIONS = 2048
"""Longest text of a model whose config has no number of positions, as in the harness."""


def require_harness(options: Sequence[str]) -> None:
    """Raise MissingPackage without the harness, ConfigError for options that are ours to set."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackage("lm-eval: lm-evaluation-harness is missing. Run `pip install lm_eval`")
    for option in options:
        if option.partition("=")[0] in _OURS:
            raise ConfigError(
                f"{option}: MODEL says which model is evaluated, and texts are batched by "
                "their number of tokens. Leave it out."
            )


def run_harness(
    model: Path, options: Sequence[str], *, best: bool, device: str, max_length: int | None
) -> None:
    """Run the command line of the harness with its `options` on a model."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    with ExitStack() as stack:
        made: Any = harness_model(model, stack, best=best, device=device, max_length=max_length)
        register_model(NAME)(made)
        before = sys.argv
        sys.argv = ["lm_eval", "run", "--model", NAME, *options]
        try:
            cli_evaluate()
        finally:
            sys.argv = before


def harness_model(
    model: Path,
    stack: ExitStack,
    *,
    best: bool = False,
    device: str = "auto",
    max_length: int | None = None,
) -> type[Any]:
    """Return a class of the harness; its objects evaluate `model`, loaded until `stack` closes."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )

    from megatrain.cli.verbs import found_model, read_only
    from megatrain.disk.hf.model import read_model_folder
    from megatrain.engine.compute.drawing import Drawing
    from megatrain.engine.engine import Engine
    from megatrain.engine.sampling import continuations
    from megatrain.models.multimodal import text_part
    from megatrain.models.rope import num_positions
    from megatrain.progress import token_progress
    from megatrain.ranks.ranks import ALONE
    from megatrain.run.evaluation.judging import prompts_as_trained
    from megatrain.run.evaluation.samples import end_tokens
    from megatrain.run.evaluation.scoring import Scored, scores
    from megatrain.run.opening.model import load_tokenizer
    from megatrain.run.this_rank import place_of

    class StreamedModel(TemplateLM):  # type: ignore[misc]
        """A model of the harness over the streamed engine."""

        def __init__(self, **_: object) -> None:
            super().__init__()
            place = place_of(device, ALONE.owner)
            found = found_model(model, best=best, ranks=ALONE)
            read = read_model_folder(found.folder)
            self.tokenizer = load_tokenizer(read.source)
            self._template_kwargs = prompts_as_trained(found, self.tokenizer)
            home = read.load(read_only(read), owner=ALONE.owner)
            self._ends = end_tokens(self.tokenizer, home)
            self._engine = stack.enter_context(Engine(home.decoder, home.store, device=place))
            config = text_part(self._engine.model_config)
            positions = num_positions(config)
            self.max_length = max_length or positions or _POSITIONS
            is_rotary = bool(getattr(config, "rope_parameters", None))
            self._most_inputs = None if is_rotary else positions

        @property
        def eot_token_id(self) -> int:
            return int(self.tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            first = self.tokenizer.bos_token_id
            return self.eot_token_id if first is None else int(first)

        @property
        def tokenizer_name(self) -> str:
            return str(self.tokenizer.name_or_path).replace("/", "__")

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: object
        ) -> list[int]:
            begins = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            if add_special_tokens is None and begins:
                add_special_tokens = False
            given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(self.tokenizer.encode(string, **given))

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **self._template_kwargs,
                )
            )

        def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
            texts = [
                Scored(
                    tokens=[*context, *continuation][-(self.max_length + 1) :],
                    num_scored=min(len(continuation), self.max_length),
                )
                for _, context, continuation in requests
            ]
            with token_progress("scoring", sum(len(text.tokens) for text in texts)) as advance:
                found = scores(self._engine, texts, self._most_inputs, advance)
            return [(score.logprob, score.is_greedy) for score in found]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows, counts = [], []
            for request in requests:
                rolling = utils.get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                parts = [(None, *utils.make_disjoint_window(window)) for window in rolling]
                windows += parts
                counts.append(len(parts))
            found = iter(self._loglikelihood_tokens(windows))
            return [sum(next(found)[0] for _ in range(count)) for count in counts]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            answers: list[str] = [""] * len(requests)
            alike: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
            for numbers in alike.values():
                asked = [requests[number].args[0] for number in numbers]
                texts = self._generated(asked, requests[numbers[0]].args[1])
                for number, text in zip(numbers, texts, strict=True):
                    answers[number] = text
            return answers

        def _generated(self, asked: list[str], given: dict[str, Any]) -> list[str]:
            """Return the texts behind prompts that ask for the same kind of generation."""
            settings = normalize_gen_kwargs(given, 256)
            if other := sorted(set(settings) - _KNOWN):
                raise ConfigError(
                    f"lm-eval: a task asks for generation with {', '.join(other)}, which is not "
                    f"here; known are {', '.join(sorted(_KNOWN))}. Set it by --gen_kwargs."
                )
            end = self.tokenizer.decode(self.eot_token_id)
            until = handle_stop_sequences(settings.get("until"), eos=end)
            longest = int(settings["max_gen_toks"])
            room = self.max_length - longest
            if room < 1:
                raise ConfigError(
                    f"lm-eval: a task generates up to {longest:,} tokens, and the model has "
                    f"{self.max_length:,} positions. Give --gen_kwargs max_gen_toks=..."
                )
            drawing = Drawing(
                temperature=settings["temperature"] if settings.get("do_sample") else 0.0,
                top_p=settings.get("top_p", 1.0) if settings.get("do_sample") else 1.0,
            )

            def is_over(tokens: Sequence[int]) -> bool:
                text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
                return any(stop in text for stop in until if stop)

            prompts = [self.tok_encode(text)[-room:] for text in asked]
            made = continuations(self._engine, prompts, longest, self._ends, drawing, is_over)
            return [
                postprocess_generated_text(
                    self.tokenizer.decode(one.tokens, skip_special_tokens=True), until, None
                )
                for one in made
            ]

    return StreamedModel
