"""What LMDeploy reads as `custom_module_map`, in each of its processes: our classes by architecture.

It stands alone in its folder because LMDeploy adds that folder to `sys.path`.
"""

_MODELS = "featcache.engine.lmdeploy.models"

CUSTOM_MODULE_MAP = {
    "InternVLForConditionalGeneration": f"{_MODELS}.GivenInternVL",
    "Qwen2VLForConditionalGeneration": f"{_MODELS}.GivenQwen2VL",
    "Qwen2_5_VLForConditionalGeneration": f"{_MODELS}.GivenQwen25VL",
    "Qwen3VLForConditionalGeneration": f"{_MODELS}.GivenQwen3VL",
}
