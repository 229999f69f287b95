# SPDX-License-Identifier: Apache-2.0
"""A MODEL for ComfyUI whose denoiser is the service.

To ComfyUI it is a MiniMax H3 like any other: its sampling schedule, latent format, conditionings, object patches, LoRAs, wrappers and callbacks
are ComfyUI's own. Only the network is elsewhere: it has no weights here and takes no memory of this process."""

import os
import uuid

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import comfy.utils
import folder_paths
import torch

from .carrier import SHIFT_AUDIO, SHIFT_VIDEO, announcement, carrier
from .checkpoint import Raw, read_checkpoint
from .conditions import condition_inputs
from .lora import Exporter
from .refusals import Refused, check_call, check_patcher
from .run import SERVICE, Interface, Run, Split, StepInputs

KEY = "latentd"  # of what is installed on a patcher
PREFIX = "diffusion_model."
Wrappers = comfy.patcher_extension.WrappersMP
Callbacks = comfy.patcher_extension.CallbacksMP

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _encode(value):
    """A tensor or a number for a safetensors file."""
    t = torch.as_tensor(value).detach().to("cpu").contiguous()
    if t.dtype not in _DTYPES:
        t = t.to(torch.float32)
    return Raw(_DTYPES[t.dtype], tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())


EXPORTER = Exporter(_encode)


class ComfyInterface(Interface):
    def __init__(self):
        self._bar = None

    def interrupted(self):
        return comfy.model_management.processing_interrupted()

    def stop(self):
        comfy.model_management.throw_exception_if_processing_interrupted()

    def progress(self, done, total):
        if self._bar is None:
            self._bar = comfy.utils.ProgressBar(1000)
        self._bar.update_absolute(min(999, int(1000 * done / total)), 1000)


class RemoteDiT(torch.nn.Module):
    """Answers what ComfyUI asks of a MiniMax H3 network."""

    def __init__(self, checkpoint, dtype, compute, split, sparse):
        super().__init__()
        self.checkpoint, self.dtype, self.compute, self.split, self.sparse = checkpoint, dtype, compute, split, sparse
        self.patch_size = (1, 2, 2)
        self.run = None
        self.patcher = None  # of the run
        self.sigmas = None

    def __getattr__(self, name):
        """A node that looks for the network's blocks, such as Load LoRA (Bypass), is told that they are not here: some go on without when they
        find none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            checkpoint = self.__dict__.get("checkpoint")
            if checkpoint is None or not any(key.split(".", 1)[0] == name for key in checkpoint.shapes):
                raise
            raise Refused(f"a node works on the network's own {PREFIX}{name}, which is in the service") from None

    def preprocess_text_embeds(self, text):
        return text  # the service refines it

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        """Names and shapes, for LoRA loaders; no values."""
        out = {} if destination is None else destination
        for name, shape in self.checkpoint.shapes.items():
            out[prefix + name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return out

    def begin(self, patcher, sigmas):
        self.end()
        shift = float(patcher.model_options.get("transformer_options", {}).get("minimax_h3_sigma_shift_video", SHIFT_VIDEO))
        self.run = Run(self.checkpoint.path, self, self.compute, self.split, sparse=self.sparse.text(shift) if self.sparse else None)
        self.patcher, self.sigmas = patcher, sigmas

    def end(self):
        run, self.run, self.patcher, self.sigmas = self.run, None, None, None
        if run is not None:
            run.close()

    @torch.compiler.disable
    def forward(self, x, timestep, context, transformer_options=None, control=None, minimax_payload=None,
                denoise_mask=None, audio_denoise_mask=None, **others):
        """x: [video [1, 24, T, H, W], the sound as the sampler carries it [1, 32, 2, A]]; the same of velocities comes back, in ComfyUI's
        sign. timestep: 1000 sigma of the picture."""
        options = transformer_options or {}
        check_call(options, control, others)
        payload = minimax_payload or {}
        if len(x) != 2 or x[0].shape[0] != 1 or x[1].shape[0] != 1:
            raise Refused(f"latents of {[list(t.shape) for t in x]}; MiniMax H3 takes one film at a time, picture and sound",
                          "Make the latent with a node for MiniMax H3, such as Empty MiniMax H3 AV Latent")
        sigma = float((timestep.flatten()[0] / 1000.0).float())
        shifts = options.get("minimax_h3_sigma_shift_video", SHIFT_VIDEO), options.get("minimax_h3_sigma_shift_audio", SHIFT_AUDIO)
        c = carrier(sigma, float(payload.get("audio_scale", 1.0)), *map(float, shifts))

        def own():  # a new one each time: wrappers may write into theirs
            return x[1] if c.plain else x[1] * torch.tensor(c.carry, dtype=x[1].dtype)

        def evaluate(x, timestep, context, transformer_options=None, minimax_payload=None, **masks):
            return self._evaluate(x, context, c, shifts, transformer_options or {}, minimax_payload or {}, masks)

        masks = {k: v for k, v in (("denoise_mask", denoise_mask), ("audio_denoise_mask", audio_denoise_mask)) if v is not None}
        out = comfy.patcher_extension.WrapperExecutor.new_class_executor(
            evaluate, self, comfy.patcher_extension.get_all_wrappers(Wrappers.DIFFUSION_MODEL, options)
        ).execute([x[0], own()], timestep, context, options, minimax_payload=payload, **masks)
        if c.plain:
            return list(out)
        return [out[0], c.offset * own() + torch.tensor(c.gain, dtype=out[1].dtype) * out[1]]

    def _evaluate(self, x, context, c, shifts, options, payload, masks):
        if context is None or context.shape[0] != 1 or context.shape[-1] != self.checkpoint.text_dim:
            shape = "none" if context is None else list(context.shape)
            raise Refused(f"the text is {shape}; this checkpoint takes [1, L, {self.checkpoint.text_dim}]", "Use its own text encoder")
        run = self.run
        if run is None:  # called outside of a sampling run
            raise RuntimeError("latentd: the model was called outside of a sampler.")
        tags, sigmas = payload.get("text_token_tags"), self._schedule(options)
        video_mask, audio_mask = masks.get("denoise_mask"), masks.get("audio_denoise_mask")
        inputs = StepInputs(
            text=context[0], video=x[0][0], audio=x[1][0], sigma_video=c.sigma_video, sigma_audio=c.sigma_audio,
            text_tags=None if tags is None else tags.reshape(-1), conditions=condition_inputs(payload), seed=int(payload.get("seed", 0)),
            mask_video=None if video_mask is None else video_mask[0, 0], mask_audio=None if audio_mask is None else audio_mask[0, 0],
            position=self._position(sigmas, c.sigma_video), loras=self._loras())
        if sigmas is not None:
            announced = announcement(sigmas, *shifts)
            if announced is not None:
                inputs.sigmas_video, inputs.sigmas_audio = (torch.tensor(x, dtype=torch.float32) for x in announced)

        def answer(like):
            return lambda tensor: (-tensor.torch()).unsqueeze(0).to(dtype=like.dtype, device=like.device)

        video, audio = run.step(inputs, ComfyInterface(), answer(x[0]), answer(x[1]))
        return [video, audio]

    def _schedule(self, options):
        sigmas = self.sigmas if self.sigmas is not None else options.get("sample_sigmas")
        return None if sigmas is None else [float(s) for s in sigmas]

    @staticmethod
    def _position(sigmas, sigma):
        """This step of how many, by the nearest sigma of the schedule."""
        if sigmas is None or len(sigmas) < 2:
            return 0, 1
        steps = len(sigmas) - 1
        return min(range(steps), key=lambda i: abs(sigmas[i] - sigma)), steps

    def _loras(self):
        patcher = self.patcher
        if patcher is None:
            return None
        folder = os.path.join(folder_paths.get_temp_directory(), KEY)

        def files():
            return [(EXPORTER.write(a, folder), a.strength, a.user) for a in EXPORTER.adapters(patcher.patches)]

        return (patcher.patches_uuid if patcher.patches else None), files


class RemoteModel(comfy.model_base.MiniMaxH3):
    def memory_required(self, *args, **kwargs):
        return 0


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """Loads and moves nothing. All else, object patches above all, is ComfyUI's."""

    def model_size(self):
        return 0

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.model.device = self.load_device
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(Callbacks.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def detach(self, unpatch_all=True):
        """With unpatch_all ComfyUI unloads the model (the button, /free), else another clone takes over."""
        r = super().detach(unpatch_all)
        if unpatch_all:
            self.model.diffusion_model.end()
            SERVICE.unload()
        return r

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        raise Refused("LoRAs are scheduled by hooks; latentd takes them at one strength for the whole run")

    def get_key_patches(self, filter_prefix=None):
        raise Refused("this model is merged or saved, and its weights are in the service")

    def state_dict_for_saving(self, *args, **kwargs):
        raise Refused("this model is saved, and its weights are in the service")


def _outer_sample(executor, noise, latent_image, sampler, sigmas, *args, **kwargs):
    patcher = executor.class_obj.model_patcher
    check_patcher(patcher)
    patcher.model.diffusion_model.begin(patcher, sigmas)
    return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)


def _cleanup(patcher):
    patcher.model.diffusion_model.end()


def remote_patcher(path, rounding=False, compute=None, split=None, sparse=None):
    """A MODEL of the file at path. rounding: latents, text and velocities as ComfyUI rounds them for a bf16 model."""
    checkpoint = read_checkpoint(path)
    dtype = torch.bfloat16 if rounding else torch.float32
    config = comfy.supported_models.MiniMaxH3({"image_model": "minimax_h3", "disable_unet_model_creation": True})
    config.set_inference_dtype(dtype, None)
    cpu = torch.device("cpu")
    model = RemoteModel(config, device=cpu)
    model.diffusion_model = RemoteDiT(checkpoint, dtype, compute, split or Split(), sparse)
    patcher = RemotePatcher(model, load_device=cpu, offload_device=cpu)
    patcher.add_wrapper_with_key(Wrappers.OUTER_SAMPLE, KEY, _outer_sample)
    patcher.add_callback_with_key(Callbacks.ON_CLEANUP, KEY, _cleanup)
    return patcher


def source_file(patcher):
    """The file that a MODEL of ComfyUI's own loader comes from."""
    if isinstance(patcher, RemotePatcher):
        raise ValueError("latentd: this model is sampled by latentd already; take this node out.")
    if not isinstance(patcher.model, comfy.model_base.MiniMaxH3):
        raise ValueError(f"latentd: this is a {type(patcher.model).__name__}; latentd samples MiniMax H3 only.")
    made = patcher.cached_patcher_init
    path = made[1][0] if made and made[1] else None
    if not isinstance(path, str) or not os.path.isfile(path):
        raise ValueError("latentd: the loader of this model does not say which file it comes from; use LatentdLoadH3 instead.")
    return path


def take_over(patcher, rounding=False, compute=None, split=None, sparse=None):
    """The same MODEL, sampled by the service: with all that other nodes have set on it."""
    remote = remote_patcher(source_file(patcher), rounding, compute, split, sparse)
    check_patcher(patcher)
    remote.patches = {key: entries[:] for key, entries in patcher.patches.items()}
    remote.patches_uuid = patcher.patches_uuid if patcher.patches else uuid.uuid4()
    remote.object_patches = patcher.object_patches.copy()
    remote.model_options = comfy.utils.deepcopy_list_dict(patcher.model_options)
    remote.attachments = patcher.attachments.copy()
    for kinds, add in ((patcher.wrappers, remote.add_wrapper_with_key), (patcher.callbacks, remote.add_callback_with_key)):
        for kind, keys in kinds.items():
            for key, functions in keys.items():
                for f in functions:
                    add(kind, key, f)
    for key, models in patcher.additional_models.items():
        remote.set_additional_models(key, models)
    return remote
