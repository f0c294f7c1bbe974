"""A stand-in for LMDeploy's engine where there is no GPU: LMDeploy's own scheduler and prefix cache, and our
input processors and spans, with transformers' language model behind them instead of LMDeploy's kernels.

Its KV blocks hold the embedding and the position of each token that was written there. A block that is reused
for a prompt it doesn't belong to gives another answer, as it would on the GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lmdeploy.messages import EngineOutput, RequestMetrics, ResponseType, ScheduleMetrics
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import SamplingParam, SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from featcache import FeatureStore
from featcache.engine import CachedVLM
from featcache.engine.encoder import VisionEncoder
from featcache.engine.lmdeploy import models
from featcache.engine.lmdeploy.engine import LMDeployEngine, LMDeploySettings
from featcache.engine.loading import Loaded

PROCESSORS = {
    "internvl": lambda config: models._InternVLProcessor(config, torch.float32),
    "qwen2_vl": models._Qwen2VLProcessor,
    "qwen2_5_vl": models._Qwen25VLProcessor,
    "qwen3_vl": lambda config: models._Qwen3VLProcessor(config, torch.float32),
}


def open_stand_in(
    loaded: Loaded,
    store: FeatureStore,
    *,
    block: int = 16,
    blocks: int = 256,
    session_len: int = 2048,
    **settings: Any,
) -> CachedVLM:
    """A CachedVLM on the LMDeploy backend with a stand-in for its engine. It owns the store."""
    encoder = VisionEncoder(loaded, store)
    stand_in = StandInEngine(loaded, block=block, blocks=blocks, session_len=session_len)
    engine = LMDeployEngine(loaded, encoder, LMDeploySettings(block=block, **settings), stand_in)
    return CachedVLM(loaded, store, encoder, engine, owns_store=True)


class StandInEngine:
    """As lmdeploy.pytorch.engine.Engine, to LMDeployEngine. Requests run one after another."""

    def __init__(
        self, loaded: Loaded, *, block: int = 16, blocks: int = 256, session_len: int = 2048
    ) -> None:
        self.loaded = loaded
        self.block = block
        self.max_session_len = session_len
        self.engine_config = SimpleNamespace(num_gpu_blocks=blocks)
        self.input_processor = PROCESSORS[loaded.family.name](loaded.model.config)  # type: ignore[no-untyped-call]
        cache = CacheConfig(
            max_batches=8,
            block_size=block,
            num_cpu_blocks=0,
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
        )
        meta = SequenceMeta(block, strategy=ARSequenceStrategy(), use_mrope=loaded.family.num_axes == 3)
        limits = SchedulerConfig(max_batches=8, max_session_len=session_len)
        self.scheduler = Scheduler(limits, cache, seq_meta=meta)
        hidden = loaded.family.text_config.hidden_size
        self.embeds = torch.zeros(blocks, block, hidden, dtype=loaded.dtype)
        self.levels = torch.zeros(3, blocks, block, hidden, dtype=loaded.dtype)
        self.is_image = torch.zeros(blocks, block, dtype=torch.bool)
        self.places = torch.zeros(3, blocks, block, dtype=torch.int64)
        self.turn: asyncio.Lock | None = None
        self.cancelled: set[int] = set()
        self.given: list[Any] = []  # the spans of every request that had some
        self.is_closed = False

    def create_instance(self) -> _Instance:
        return _Instance(self)

    def get_schedule_metrics(self) -> ScheduleMetrics:
        free = self.scheduler.block_manager.get_num_free_gpu_blocks()
        return ScheduleMetrics(cache_usage=1 - free / self.engine_config.num_gpu_blocks)

    def close(self) -> None:
        self.is_closed = True

    # One sequence at a time

    def write(self, sequence: Any, embeds: torch.Tensor) -> None:
        """Fill the places of the tokens that aren't history yet."""
        start, stop = sequence.num_history_ids, sequence.num_all_ids
        table = self.scheduler.get_block_tables([sequence])[0]
        at = np.arange(start, stop)
        block, slot = torch.from_numpy(table[at // self.block]), torch.from_numpy(at % self.block)
        self.embeds[block, slot] = embeds
        self.is_image[block, slot] = False
        if self.loaded.family.num_axes == 3:
            places = torch.from_numpy(np.asarray(sequence.history_mrope_pos_ids._data[start:stop]))
        else:
            places = torch.from_numpy(at)[:, None].repeat(1, 3)
        self.places[:, block, slot] = places.T
        for item in (sequence.get_input_multimodals() or {}).get("image", []):
            if item.data:
                inside = slice(item.start - start, item.end - start)
                self.embeds[block[inside], slot[inside]] = item.data[0].to(embeds.dtype)
                self.is_image[block[inside], slot[inside]] = True
                for level, rows in enumerate(item.data[1:]):
                    self.levels[level, block[inside], slot[inside]] = rows.to(embeds.dtype)

    @torch.no_grad()
    def logits(self, sequence: Any) -> torch.Tensor:
        """Of the last token, from nothing but what the blocks hold."""
        table = torch.from_numpy(self.scheduler.get_block_tables([sequence])[0].astype(np.int64))
        total = sequence.num_all_ids
        embeds = self.embeds[table].flatten(0, 1)[:total]
        places = self.places[:, table].flatten(1, 2)[:, None, :total]
        extra: dict[str, Any] = {}
        if self.loaded.family.name == "qwen3_vl":
            is_image = self.is_image[table].flatten(0, 1)[:total]
            levels = self.levels[:, table].flatten(1, 2)[:, :total]
            number = len(self.loaded.model.config.vision_config.deepstack_visual_indexes)
            extra["visual_pos_masks"] = is_image[None]
            extra["deepstack_visual_embeds"] = [levels[level][is_image] for level in range(number)]
        model = self.loaded.model.model.language_model
        is_3d = self.loaded.family.num_axes == 3
        hidden = model(
            inputs_embeds=embeds[None],
            position_ids=places if is_3d else places[0],
            use_cache=False,
            **extra,
        ).last_hidden_state
        logits: torch.Tensor = self.loaded.model.lm_head(hidden[0, -1])
        return logits


def _chosen(logits: torch.Tensor, params: Any, generator: torch.Generator) -> int:
    if params.top_k == 1:
        return int(logits.argmax())
    shares = (logits / params.temperature).softmax(-1)
    return int(torch.multinomial(shares, 1, generator=generator))


class _Instance:
    """As lmdeploy.pytorch.engine.engine_instance.EngineInstance."""

    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine

    async def async_cancel(self, session_id: int) -> None:
        self.engine.cancelled.add(session_id)

    async def async_stream_infer(
        self,
        session_id: int,
        input_ids: list[int],
        gen_config: Any = None,
        multimodal: list[dict[str, Any]] | None = None,
    ) -> AsyncIterator[EngineOutput]:
        engine = self.engine
        if engine.turn is None:
            engine.turn = asyncio.Lock()
        async with engine.turn:
            multimodals = None
            if multimodal:
                result = engine.input_processor.preprocess_input(input_ids, multimodal)
                input_ids, multimodals = result.input_ids, result.input_multimodals
                engine.given.append(multimodals["image"])
            params = SamplingParam.from_gen_config(gen_config)
            session = engine.scheduler.add_session(session_id)
            sequence = session.add_sequence(input_ids, sampling_param=params, multimodals=multimodals)
            try:
                async for output in self._run(sequence, params, gen_config):
                    yield output
                    await asyncio.sleep(0)
            finally:
                engine.scheduler.end_session(session_id)

    async def _run(self, sequence: Any, params: Any, gen_config: Any) -> AsyncIterator[EngineOutput]:
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.schedule(is_prefill=True)
        scheduler.activate_seqs([sequence])
        metrics = RequestMetrics(0.0, [], cached_tokens=sequence.cached_tokens)
        embed = engine.loaded.model.get_input_embeddings()
        mode = UpdateTokenMode.PREFILL
        generator = torch.Generator().manual_seed(params.random_seed or 0)
        for number in range(params.max_new_tokens):
            if sequence.session_id in engine.cancelled:
                yield EngineOutput(ResponseType.CANCEL, [], req_metrics=metrics)
                return
            ids = torch.from_numpy(sequence.all_ids[sequence.num_history_ids :].astype(np.int64))
            with torch.no_grad():
                engine.write(sequence, embed(ids))
            values = engine.logits(sequence).float()
            plain = values.log_softmax(-1)
            for processor in gen_config.logits_processors or ():
                values = processor(torch.from_numpy(sequence.all_ids.astype(np.int64)), values)
            token = _chosen(values, params, generator)
            sequence.update_token_ids(np.array([token]), mode=mode)
            mode = UpdateTokenMode.DECODE
            scheduler.schedule_running([sequence])
            is_last = token in (params.stop_words or ()) or number + 1 == params.max_new_tokens
            best = plain.topk(params.num_logprobs if params.num_logprobs > 0 else 1)
            found = {int(i): float(v) for v, i in zip(*best, strict=True)} | {token: float(plain[token])}
            kind = ResponseType.FINISH if is_last else ResponseType.SUCCESS
            logprobs = [found] if params.num_logprobs > 0 else None
            yield EngineOutput(kind, [token], logprobs=logprobs, req_metrics=metrics)
            if is_last:
                return
