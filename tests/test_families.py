"""Each family's adapter against the model's own processor and forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import BUILDERS
from pictures import SIZES, dialogue, noise
from transformers import DynamicCache

from featcache.engine.families.base import ImageOptions
from featcache.engine.families.registry import FAMILIES, family_of, load_family
from featcache.engine.loading import Loaded, load_model
from featcache.errors import ImageError, ModelError, RequestError

ALONE = ImageOptions()


@pytest.fixture(scope="module")
def load(model_folder: Callable[[str], Path]) -> Callable[[str], Loaded]:
    loaded: dict[str, Loaded] = {}

    def load(name: str) -> Loaded:
        if name not in loaded:
            loaded[name] = load_model(model_folder(name), device="cpu")
        return loaded[name]

    return load


class Case:
    """A dialogue of `number` images: the processor's own inputs, and what the adapter makes of it."""

    def __init__(self, loaded: Loaded, number: int) -> None:
        self.loaded, self.family = loaded, loaded.family
        images = [noise(*size, seed) for seed, size in enumerate(SIZES[:number])]
        self.inputs = loaded.processor.apply_chat_template(
            dialogue(images), tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        self.ids = self.inputs["input_ids"][0]
        options = self.family.options_for(ALONE, number)
        self.pixels = [self.family.preprocess(image, options) for image in images]
        self.layouts = [pixels.layout for pixels in self.pixels]
        self.positions, self.delta = self.family.positions(self.ids, self.layouts)
        self.at = (self.ids == self.family.image_token_id).nonzero()[:, 0]

    def rows(self) -> dict[str, torch.Tensor]:
        return joined(self.family.encode(self.pixels))

    def prefill(self, rows: dict[str, torch.Tensor], cache: Any = None) -> torch.Tensor:
        every = torch.arange(len(self.ids))
        mask = self.mask(self.ids[None], cache)
        return self.family.language_model_forward(
            self.ids[None], self.positions, self.at, rows, cache, every, **mask
        )

    def mask(self, ids: torch.Tensor, cache: Any) -> dict[str, Any]:
        """Of Gemma 3, whose images see themselves in both directions: as the model makes it."""
        if not self.family.bidirectional_images:
            return {}
        attended = torch.ones_like(ids)
        kinds = (ids == self.family.image_token_id).long()
        return {
            "attention_mask": self.loaded.model.create_masks_for_generate(
                self.loaded.model.config,
                self.family.embed(ids),
                attended,
                cache,
                self.positions,
                token_type_ids=kinds,
            )
        }


def joined(images: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([tensors[name] for tensors in images]) for name in images[0]}


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def test_nine_families_are_known() -> None:
    assert set(FAMILIES) == set(BUILDERS)
    assert len(FAMILIES) == 9


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_logits_equal_the_models_own(load: Callable[[str], Loaded], name: str, number: int) -> None:
    case = Case(load(name), number)
    assert len(case.at) == sum(layout.num_tokens for layout in case.layouts)
    with torch.no_grad():
        own = case.loaded.model(**case.inputs).logits[0]
    rows = case.rows()
    assert worst(case.prefill(rows), own) <= 1e-5
    # control: rows of another picture move the last token's logits
    other = joined(case.family.encode([another(case, pixels.layout) for pixels in case.pixels]))
    assert worst(case.prefill(other)[-1], own[-1]) > 1e-3


def another(case: Case, layout: Any) -> Any:
    options = case.family.options_for(ALONE, len(case.pixels))
    return case.family.preprocess(noise(layout.width, layout.height, 77), options)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_the_rows_of_each_image_alone(load: Callable[[str], Loaded], name: str) -> None:
    case = Case(load(name), 3)
    batch = case.family.encode(case.pixels)
    for pixels, tensors in zip(case.pixels, batch, strict=True):
        (alone,) = case.family.encode([pixels])
        assert tensors.keys() == alone.keys()
        assert all(worst(tensors[n], alone[n]) <= 1e-6 for n in alone)
        assert all(tensors[n].shape[0] == pixels.layout.num_tokens for n in alone)
    deepstack = {f"deepstack.{level}" for level in range(2)} if name == "qwen3_vl" else set()
    assert batch[0].keys() == {"rows", *deepstack}


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_the_models_rope_index(load: Callable[[str], Loaded], name: str) -> None:
    case = Case(load(name), 3)
    inputs = {n: case.inputs[n] for n in ("mm_token_type_ids", "image_grid_thw", "attention_mask")}
    positions, delta = case.loaded.model.model.get_rope_index(case.inputs["input_ids"], **inputs)
    assert torch.equal(case.positions, positions[:, 0])
    assert case.delta == int(delta) < 0


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoded_token_continues_the_prompt(load: Callable[[str], Loaded], name: str) -> None:
    case = Case(load(name), 2)
    total = len(case.ids)
    cache = DynamicCache()
    token = int(case.prefill(case.rows(), cache)[-1].argmax())
    place = torch.full((case.family.num_axes, 1), total + case.delta)
    mask = {"attention_mask": torch.ones(1, total + 1, dtype=torch.int64)}
    decoded = case.family.language_model_forward(
        torch.tensor([[token]]),
        place,
        torch.zeros(0, dtype=torch.int64),
        None,
        cache,
        torch.tensor([0]),
        **mask,
    )
    with torch.no_grad():
        generated = case.loaded.model.generate(
            **case.inputs,
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert int(generated.sequences[0, total]) == token
    assert worst(decoded[0], generated.logits[1][0]) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_rows_are_those_of_the_models_own_call(model_folder: Callable[[str], Path], name: str) -> None:
    case = Case(load_model(model_folder(name), device="cpu", dtype="bfloat16"), 2)
    vision = {n: v for n, v in case.inputs.items() if n in VISION}
    with torch.no_grad():
        own = case.loaded.model.get_image_features(**vision).pooler_output
    flat = own.flatten(0, 1) if isinstance(own, torch.Tensor) else torch.cat(list(own))
    rows = case.rows()["rows"]
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, flat.reshape(rows.shape))


VISION = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images", "pixel_attention_mask")


def test_onevision_encodes_cut_and_whole_images_in_one_call(load: Callable[[str], Loaded]) -> None:
    family = load("llava_onevision").family
    several = family.options_for(ALONE, 2)
    images = [noise(*size, 5) for size in SIZES]
    pixels = [family.preprocess(i, o) for i, o in zip(images, (several, ALONE, several), strict=True)]
    mixed = family.encode(pixels)
    for one, tensors in zip(pixels, mixed, strict=True):
        assert worst(tensors["rows"], family.encode([one])[0]["rows"]) <= 1e-6
    assert [p.layout.num_tokens for p in pixels] == [17, len(mixed[1]["rows"]), 17]
    assert pixels[1].layout.tiles == (3, 1)
    assert family.options_for(ALONE, 1) == ALONE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(1, 1), (1, 100), (332, 27), (1093, 5), (3000, 1)])
def test_extreme_shapes_are_encoded_or_refused(
    load: Callable[[str], Loaded], name: str, size: tuple[int, int]
) -> None:
    family = load(name).family
    if name.startswith("qwen") and max(size) > 200 * min(size):
        with pytest.raises(
            ImageError, match=rf"^page 3: {size[0]}x{size[1]} can't be prepared .* aspect ratio"
        ):
            family.preprocess(noise(*size, 0), ALONE, "page 3")
        return
    pixels = family.preprocess(noise(*size, 0), ALONE)
    (tensors,) = family.encode([pixels])
    assert bool(tensors["rows"].isfinite().all())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_qwen_keeps_to_the_pixels_asked_for(load: Callable[[str], Loaded], name: str) -> None:
    family = load(name).family
    cell = (family.image_processor.patch_size * 2) ** 2
    image = noise(150, 150, 0)
    assert family.preprocess(image, ImageOptions(max_pixels=9 * cell)).layout.num_tokens == 9
    assert (
        family.preprocess(image, ImageOptions(max_pixels=cell)).layout.num_tokens == 1
    )  # below its own least
    assert family.preprocess(noise(30, 30, 0), ImageOptions(min_pixels=100 * cell)).layout.num_tokens == 100


@pytest.mark.parametrize("name", ["internvl", "idefics3", "smolvlm"])
@pytest.mark.parametrize("most", [1, 2, 4, 6])
def test_never_more_tiles_than_asked_for(load: Callable[[str], Loaded], name: str, most: int) -> None:
    family = load(name).family
    for size in (*SIZES, (400, 90)):
        layout = family.preprocess(noise(*size, 0), ImageOptions(max_tiles=most)).layout
        assert layout.tiles is not None
        rows, columns = layout.tiles
        assert rows * columns <= most
        assert layout.num_tokens == 4 * (1 if rows * columns == 1 else rows * columns + 1)


def test_gemma_cuts_crops_only_when_asked(load: Callable[[str], Loaded]) -> None:
    loaded = load("gemma3")
    family, image = loaded.family, noise(900, 300, 0)
    pixels = family.preprocess(image, ImageOptions(max_tiles=3))
    asked = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3}
    own = loaded.processor(
        images=[[image]], text=["<start_of_image> x"], images_kwargs=asked, return_tensors="pt"
    )
    text = family.replacement(pixels.layout) + " x"
    assert loaded.tokenizer(text)["input_ids"] == own["input_ids"][0].tolist()
    assert torch.equal(pixels.tensors["pixel_values"], own["pixel_values"])
    assert pixels.layout.num_tokens == 4 * len(own["pixel_values"]) > 4
    assert family.preprocess(image, ALONE).layout.num_tokens == 4
    assert family.preprocess(image, ImageOptions(max_tiles=1)).layout.num_tokens == 4


def test_an_option_that_a_family_does_not_have_is_refused(load: Callable[[str], Loaded]) -> None:
    with pytest.raises(RequestError, match="max_tiles: qwen2_vl understands max_pixels, min_pixels"):
        load("qwen2_vl").family.options_for(ImageOptions(max_tiles=2), 1)
    with pytest.raises(RequestError, match="min_pixels: llava has no image options"):
        load("llava").family.options_for(ImageOptions(min_pixels=2), 1)


@pytest.mark.parametrize(
    "bad", [{"max_tiles": 0}, {"min_pixels": -1}, {"max_pixels": True}, {"max_tiles": 1.5}]
)
def test_a_bad_option_names_itself(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(bad))}: "):
        ImageOptions(**bad)
    with pytest.raises(RequestError, match="min_pixels: 9 is above max_pixels, 4"):
        ImageOptions(min_pixels=9, max_pixels=4)


@pytest.mark.parametrize("name", FAMILIES)
def test_encoder_weights_are_all_but_the_language_model(load: Callable[[str], Loaded], name: str) -> None:
    loaded = load(name)
    language = ("model.language_model.", "model.text_model.", "lm_head.")
    expected = {n for n in loaded.model.state_dict() if not n.startswith(language)}
    names = [n for n, _ in loaded.family.encoder_weights()]
    assert len(names) == len(set(names)) > 20
    assert set(names) == expected


@pytest.mark.parametrize("name", ["qwen2_vl", "internvl", "idefics3"])
def test_threads_preprocess_at_once(load: Callable[[str], Loaded], name: str) -> None:
    family = load(name).family
    images = [noise(40 + 9 * i, 120 - 5 * i, i) for i in range(16)]
    alone = [family.preprocess(image, ALONE) for image in images]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda image: family.preprocess(image, ALONE), images))
    for a, b in zip(alone, together, strict=True):
        assert a.layout == b.layout
        assert torch.equal(a.tensors["pixel_values"], b.tensors["pixel_values"])


def test_unknown_architectures_are_refused_with_what_is_known(load: Callable[[str], Loaded]) -> None:
    config = copy.deepcopy(load("qwen2_vl").model.config)
    config.model_type = "pali"
    with pytest.raises(
        ModelError, match=r"'pali' isn't known .* gemma3, idefics3, internvl, llava, .* qwen3_vl"
    ):
        family_of(config)


def test_layers_without_a_state_per_token_are_refused(model_folder: Callable[[str], Path]) -> None:
    loaded = load_model(model_folder("internvl"), device="cpu")
    loaded.model.config.text_config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ModelError, match="layers of type linear_attention"):
        load_family(loaded.model, loaded.processor)


def test_llava_with_another_tower_is_refused(model_folder: Callable[[str], Path]) -> None:
    loaded = load_model(model_folder("llava"), device="cpu")
    loaded.model.config.vision_config.model_type = "pixtral"
    with pytest.raises(ModelError, match="llava with a pixtral tower isn't known"):
        load_family(loaded.model, loaded.processor)


def test_a_context_ends_where_rope_would_change(model_folder: Callable[[str], Path]) -> None:
    loaded = load_model(model_folder("internvl"), device="cpu")
    assert loaded.family.max_positions == 4096
    loaded.family.text_config.rope_parameters = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
    }
    assert loaded.family.max_positions == 512


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model", "/nowhere/model: no such folder"),
        ("./nowhere", "no such folder"),
        ("some/hub-name", "neither the bundled model .*, nor a local folder, nor to be had"),
    ],
)
def test_a_model_that_is_not_there(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(model, device="cpu")


def test_a_damaged_model_says_what_is_wrong(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(tmp_path, device="cpu")
    for file in model_folder("llava").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="can't be loaded"):
        load_model(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"its config\.json can't be used"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(ModelError, match="dtype 'int3'; there are auto, float32"):
        load_model(model_folder("llava"), device="cpu", dtype="int3")
