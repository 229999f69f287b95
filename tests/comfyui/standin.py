# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the surface of ComfyUI that the pack uses: the same names, arguments and order of calls, and none of its code.

install() puts it into sys.modules; after that the pack can be imported. Sampler stands for a sampling run: it packs nothing and has no conditions of
its own, but calls the model as ComfyUI's does."""

import sys
import types
import uuid
from collections import OrderedDict
from typing import ClassVar

import torch


class Interrupted(BaseException):
    pass


class State:
    """What tests look at and set."""

    interrupted = False
    progress: ClassVar[list] = []
    files: ClassVar[dict] = {}  # folder: {name: path}
    temp = None


# ---- comfy.patcher_extension

class WrappersMP:
    OUTER_SAMPLE = "outer_sample"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


class CallbacksMP:
    ON_LOAD = "on_load_after"
    ON_CLEANUP = "on_cleanup"
    ON_PREPARE_STATE = "on_prepare_state"


class WrapperExecutor:
    def __init__(self, original, class_obj, wrappers, at=0):
        self.original, self.class_obj, self.wrappers, self.at = original, class_obj, wrappers, at

    @classmethod
    def new_class_executor(cls, original, class_obj, wrappers):
        return cls(original, class_obj, wrappers)

    def execute(self, *args, **kwargs):
        if self.at == len(self.wrappers):
            return self.original(*args, **kwargs)
        return self.wrappers[self.at](WrapperExecutor(self.original, self.class_obj, self.wrappers, self.at + 1), *args, **kwargs)

    __call__ = execute


def get_all_wrappers(kind, transformer_options):
    return [w for ws in transformer_options.get("wrappers", {}).get(kind, {}).values() for w in ws]


# ---- comfy.model_patcher

class ModelPatcher:
    def __init__(self, model, load_device, offload_device, size=0):
        self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size
        self.patches, self.object_patches, self.object_patches_backup, self.model_options = {}, {}, {}, {"transformer_options": {}}
        self.patches_uuid, self.cached_patcher_init = uuid.uuid4(), None
        self.callbacks, self.wrappers, self.attachments, self.additional_models = {}, {}, {}, {}
        self.hook_patches, self.weight_wrapper_patches, self.injections = {}, {}, {}

    def clone(self):
        n = type(self)(self.model, self.load_device, self.offload_device, self.size)
        n.patches = {k: v[:] for k, v in self.patches.items()}
        n.patches_uuid, n.object_patches, n.object_patches_backup = self.patches_uuid, self.object_patches.copy(), self.object_patches_backup
        n.model_options = deepcopy_list_dict(self.model_options)
        n.cached_patcher_init = self.cached_patcher_init
        for mine, its in ((self.callbacks, n.callbacks), (self.wrappers, n.wrappers)):
            its.update({k: {key: f[:] for key, f in v.items()} for k, v in mine.items()})
        return n

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        names = self.model.state_dict()
        for key in [k for k in patches if k in names]:
            self.patches.setdefault(key, []).append((strength_patch, patches[key], strength_model, None, None))
        self.patches_uuid = uuid.uuid4()

    def add_object_patch(self, name, value):
        self.object_patches[name] = value

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def get_all_callbacks(self, kind):
        return [f for fs in self.callbacks.get(kind, {}).values() for f in fs]

    def set_additional_models(self, key, models):
        self.additional_models[key] = models

    def patch_model(self, device_to=None):
        for name, value in self.object_patches.items():
            self.object_patches_backup.setdefault(name, getattr(self.model, name))
            setattr(self.model, name, value)
        self.load(device_to)

    def unpatch_model(self):
        for name, value in self.object_patches_backup.items():
            setattr(self.model, name, value)
        self.object_patches_backup.clear()

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        raise AssertionError("weights would be loaded here")

    def model_size(self):
        raise AssertionError("the size would be counted here")

    def detach(self, unpatch_all=True):
        if unpatch_all:
            self.unpatch_model()

    def cleanup(self):
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLEANUP):
            callback(self)


# ---- comfy.model_base, comfy.supported_models

class Sampling(torch.nn.Module):
    def __init__(self, shift=12.0, audio_shift=3.0):
        super().__init__()
        self.shift, self.audio_shift = shift, audio_shift

    @property
    def audio_scale(self):
        return self.shift / self.audio_shift


class BaseModel(torch.nn.Module):
    def __init__(self, model_config, model_type=None, device=None):
        super().__init__()
        assert model_config.unet_config["disable_unet_model_creation"], "a network of 20 GB would be made here"
        self.model_config, self.device, self.current_patcher = model_config, device, None
        self.model_sampling = Sampling()


class MiniMaxH3(BaseModel):
    pass


class SupportedMiniMaxH3:
    def __init__(self, unet_config):
        self.unet_config, self.manual_cast_dtype = dict(unet_config), None

    def set_inference_dtype(self, dtype, manual_cast_dtype):
        self.unet_config["dtype"], self.manual_cast_dtype = dtype, manual_cast_dtype


# ---- comfy.model_management, comfy.utils, folder_paths

def throw_exception_if_processing_interrupted():
    if State.interrupted:
        State.interrupted = False
        raise Interrupted


class ProgressBar:
    def __init__(self, total):
        self.total = total

    def update_absolute(self, value, total=None):
        throw_exception_if_processing_interrupted()
        State.progress.append(value / (total or self.total))


def deepcopy_list_dict(x):
    if isinstance(x, dict):
        return {k: deepcopy_list_dict(v) for k, v in x.items()}
    return [deepcopy_list_dict(v) for v in x] if isinstance(x, list) else x


def get_full_path_or_raise(folder, name):
    if name not in State.files.get(folder, {}):
        raise FileNotFoundError(f"{name} is not in {folder}")
    return State.files[folder][name]


# ---- comfy_api.latest.io

class Field:
    def __init__(self, kind, name=None, **options):
        self.kind, self.name, self.options = kind, name, options


def socket_type(kind):
    return type(kind, (), {"Input": staticmethod(lambda name, **o: Field(kind, name, **o)), "Output": staticmethod(lambda **o: Field(kind, None, **o))})


class ComfyNode:
    pass


class Schema:
    def __init__(self, node_id, display_name=None, category="", description="", search_aliases=(), inputs=(), outputs=(), is_output_node=False,
                 not_idempotent=False, is_experimental=False):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class NodeOutput:
    def __init__(self, *args, ui=None):
        self.args, self.ui = args, ui


class ComfyExtension:
    pass


def module(name, **content):
    m = sys.modules[name] = types.ModuleType(name)
    m.__dict__.update(content)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, m)


def install():
    if not hasattr(torch, "compiler"):  # torch 1
        torch.compiler = types.SimpleNamespace(disable=lambda f: f)
    io = types.SimpleNamespace(ComfyNode=ComfyNode, Schema=Schema, NodeOutput=NodeOutput, Custom=socket_type, AnyType=socket_type("*"),
                               **{k: socket_type(k.upper()) for k in ("Model", "Combo", "String", "Int", "Float")})
    for name in ("comfy", "comfy_api"):
        module(name, __path__=[])
    module("comfy.patcher_extension", WrappersMP=WrappersMP, CallbacksMP=CallbacksMP, WrapperExecutor=WrapperExecutor,
           get_all_wrappers=get_all_wrappers)
    module("comfy.model_patcher", ModelPatcher=ModelPatcher)
    module("comfy.model_base", MiniMaxH3=MiniMaxH3)
    module("comfy.supported_models", MiniMaxH3=SupportedMiniMaxH3)
    module("comfy.model_management", processing_interrupted=lambda: State.interrupted,
           throw_exception_if_processing_interrupted=throw_exception_if_processing_interrupted)
    module("comfy.utils", ProgressBar=ProgressBar, deepcopy_list_dict=deepcopy_list_dict)
    module("comfy_api.latest", io=io, ComfyExtension=ComfyExtension)
    module("folder_paths", get_filename_list=lambda folder: list(State.files.get(folder, {})), get_full_path_or_raise=get_full_path_or_raise,
           get_full_path=lambda folder, name: State.files.get(folder, {}).get(name), get_temp_directory=lambda: State.temp)


# ---- a sampling run

class Sampler:
    """A guider with one conditioning. payload and text as a conditioning brings them, seed as the sampler has it."""

    def __init__(self, patcher, text, payload=None, seed=0):
        self.model_patcher, self.text, self.payload, self.seed = patcher, text, payload or {}, seed
        self.model_options = deepcopy_list_dict(patcher.model_options)

    def sample(self, video, audio, sigmas, steps, **extra):
        """steps(model): model(video, audio, sigma) → velocities in ComfyUI's sign; audio is carried in both."""
        wrappers = [w for ws in self.model_patcher.wrappers.get(WrappersMP.OUTER_SAMPLE, {}).values() for w in ws]
        return WrapperExecutor(self._outer_sample, self, wrappers).execute(None, (video, audio), steps, sigmas, extra=extra)

    def _outer_sample(self, noise, latents, steps, sigmas, extra):
        patcher = self.model_patcher
        patcher.patch_model(patcher.load_device)
        model = patcher.model
        try:
            model.current_patcher = patcher
            options = {**deepcopy_list_dict(self.model_options["transformer_options"]), "cond_or_uncond": [0], "uuids": [uuid.uuid4()],
                       "sample_sigmas": sigmas, "wrappers": patcher.wrappers, "callbacks": patcher.callbacks, "prefetch_dynamic_vbars": False}
            network, dtype = model.diffusion_model, model.model_config.unet_config["dtype"]
            context = network.preprocess_text_embeds(self.text.unsqueeze(0).to(dtype))
            payload = {"seed": self.seed, "audio_scale": model.model_sampling.audio_scale, **self.payload}

            def call(video, audio, sigma):
                out = network([video.unsqueeze(0).to(dtype), audio.unsqueeze(0).to(dtype)], torch.tensor([sigma * 1000.0]), context=context,
                              control=extra.pop("control", None), transformer_options={**options, **extra.pop("options", {})},
                              minimax_payload=payload, **extra)
                return [x[0] for x in out]

            return steps(call)
        finally:
            patcher.cleanup()


class LoRAAdapter:
    name = "lora"

    def __init__(self, weights):
        self.weights = weights


def lora_patches(tensors):
    """{weight name: LoRAAdapter} of a file with the names that ComfyUI accepts, in the order of the file."""
    found = OrderedDict()
    for name in [n for n in tensors if n.endswith(".lora_B.weight")]:
        module_name = name[:-len(".lora_B.weight")]
        alpha = tensors.get(module_name + ".alpha")
        found[module_name + ".weight"] = LoRAAdapter((tensors[name], tensors[module_name + ".lora_A.weight"], None if alpha is None else alpha.item(),
                                                      None, None, None))
    return found
