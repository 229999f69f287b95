# SPDX-License-Identifier: Apache-2.0
"""The structs of client/latent.h, field by field. tests/python/test-layout compares them with the header."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_int32, c_uint32, c_uint64, c_void_p
from typing import ClassVar

DIMS_MAX = 8
ALIGNMENT = 64

BUS_AUTO, BUS_SYSTEM, BUS_USER, BUS_ADDRESS = range(4)
CLIENT_NO_RESUME = 1
SAMPLE_KEEP_STEPS = 1
RENDER_KEEP_LATENTS = 1
RENDER_FILE = 2
MEDIA_LAST = 1
MEDIA_SOUND = 2
MEDIA_SILENT = 4
RENDER_SHEET = 4
JOB_STATES = ("queued", "running", "cancelling", "done", "failed", "cancelled")
VALUE_BOOL, VALUE_UINT, VALUE_INT, VALUE_DOUBLE, VALUE_STRING, VALUE_LIST, VALUE_DICT = range(1, 8)


class Struct(ctypes.Structure):
    """Option structs start with their size: sized() makes one with it set and the rest zero."""

    _fields_: ClassVar = []


def sized(kind: type[Struct]) -> Struct:
    s = kind()
    s.struct_size = ctypes.sizeof(kind)
    return s


class latent_error(Struct):  # noqa: N801 (names of the header)
    _fields_: ClassVar = [("code", c_int32), ("name", c_char * 60), ("text", c_char * 1024)]


class latent_client_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("bus", c_uint32),
        ("address", c_char_p),
        ("socket", c_char_p),
        ("flags", c_uint32),
        ("restart_timeout_sec", c_uint32),
    ]


class latent_load_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("name", c_char_p),
        ("qkv_order", c_char_p),
        ("partition", c_char_p),
        ("numa", c_char_p),
        ("tokenizer", c_char_p),
    ]


class latent_tensor(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("offset", c_uint64),
        ("size", c_uint64),
        ("dtype", c_char * 16),
        ("n_dims", c_uint32),
        ("reserved", c_uint32),
        ("shape", c_uint64 * DIMS_MAX),
    ]


class latent_session_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("ranks", c_uint32),
        ("input_bytes", c_uint64),
        ("output_bytes", c_uint64),
        ("compute", c_char_p),
        ("job_class", c_char_p),
        ("shares", POINTER(c_uint32)),
        ("n_shares", c_uint32),
        ("chunks", c_uint32),
        ("plan", c_char_p),
        ("exchange", c_char_p),
        ("gpus", POINTER(c_char_p)),
        ("n_gpus", c_uint32),
        ("reserved", c_uint32),
        ("conditioner", c_void_p),
        ("video_vae", c_void_p),
        ("audio_vae", c_void_p),
        ("sparse", c_char_p),
    ]


class latent_lora(Struct):  # noqa: N801
    _fields_: ClassVar = [("model", c_void_p), ("strength", c_double)]


class latent_condition(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("kind", c_char_p),
        ("frame", c_uint64),
        ("video", POINTER(latent_tensor)),
        ("audio", POINTER(latent_tensor)),
    ]


class latent_step_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("text", POINTER(latent_tensor)),
        ("text_tags", POINTER(latent_tensor)),
        ("video", POINTER(latent_tensor)),
        ("audio", POINTER(latent_tensor)),
        ("sigma_video", c_double),
        ("sigma_audio", c_double),
        ("compute", c_char_p),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
        ("conditions", POINTER(latent_condition)),
        ("n_conditions", c_uint32),
        ("has_seed", c_uint32),
        ("condition_noise", c_char_p),
        ("seed", c_uint64),
        ("mask_video", POINTER(latent_tensor)),
        ("mask_audio", POINTER(latent_tensor)),
        ("sigmas_video", POINTER(latent_tensor)),
        ("sigmas_audio", POINTER(latent_tensor)),
    ]


class latent_sample_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("text", POINTER(latent_tensor)),
        ("text_tags", POINTER(latent_tensor)),
        ("video", POINTER(latent_tensor)),
        ("audio", POINTER(latent_tensor)),
        ("sigmas_video", POINTER(latent_tensor)),
        ("sigmas_audio", POINTER(latent_tensor)),
        ("steps", c_uint32),
        ("reserved", c_uint32),
        ("schedule", c_char_p),
        ("shift_video", c_double),
        ("shift_audio", c_double),
        ("sampler", c_char_p),
        ("compute", c_char_p),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
        ("conditions", POINTER(latent_condition)),
        ("n_conditions", c_uint32),
        ("has_seed", c_uint32),
        ("condition_noise", c_char_p),
        ("seed", c_uint64),
        ("mask_video", POINTER(latent_tensor)),
        ("mask_audio", POINTER(latent_tensor)),
        ("noise", c_char_p),
        ("clean_video", POINTER(latent_tensor)),
        ("clean_audio", POINTER(latent_tensor)),
    ]


class latent_tokenize_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("text", POINTER(latent_tensor)),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
    ]


class latent_picture(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("kind", c_char_p),
        ("picture", POINTER(latent_tensor)),
        ("sound", c_uint32),
        ("reserved", c_uint32),
    ]


class latent_media(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("kind", c_char_p),
        ("name", c_char_p),
        ("file", c_int32),
        ("flags", c_uint32),
    ]


class latent_encode_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("n_pictures", c_uint32),
        ("text", POINTER(latent_tensor)),
        ("pictures", POINTER(latent_picture)),
        ("picture_rule", c_char_p),
        ("type", c_char_p),
        ("compute", c_char_p),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
        ("files", POINTER(latent_media)),
        ("n_files", c_uint32),
        ("width", c_uint32),
        ("height", c_uint32),
        ("frames", c_uint32),
    ]


class latent_decode_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("video", POINTER(latent_tensor)),
        ("audio", POINTER(latent_tensor)),
        ("type", c_char_p),
        ("frames", c_uint64),
        ("compute", c_char_p),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
    ]


class latent_encode_media_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("has_seed", c_uint32),
        ("video", POINTER(latent_tensor)),
        ("audio", POINTER(latent_tensor)),
        ("posterior", c_char_p),
        ("seed", c_uint64),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
    ]


class latent_render_options(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("prompt", POINTER(latent_tensor)),
        ("width", c_uint32),
        ("height", c_uint32),
        ("frames", c_uint32),
        ("steps", c_uint32),
        ("sigmas_video", POINTER(latent_tensor)),
        ("sigmas_audio", POINTER(latent_tensor)),
        ("schedule", c_char_p),
        ("shift_video", c_double),
        ("shift_audio", c_double),
        ("sampler", c_char_p),
        ("noise", c_char_p),
        ("seed", c_uint64),
        ("has_seed", c_uint32),
        ("file", c_int32),
        ("format", c_char_p),
        ("type", c_char_p),
        ("ring", c_uint64),
        ("compute", c_char_p),
        ("output_offset", c_uint64),
        ("output_bytes", c_uint64),
        ("pictures", POINTER(latent_media)),
        ("n_pictures", c_uint32),
        ("reserved", c_uint32),
        ("picture_rule", c_char_p),
        ("sheet", c_int32),
        ("sheet_columns", c_uint32),
        ("sheet_rows", c_uint32),
        ("preview_steps", c_uint32),
        ("preview_map", POINTER(c_double)),
    ]


class latent_progress(Struct):  # noqa: N801
    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("state", c_uint32),
        ("phase", c_char * 32),
        ("step", c_uint32),
        ("steps", c_uint32),
        ("block", c_uint32),
        ("blocks", c_uint32),
        ("fraction", c_double),
        ("eta_usec", c_uint64),
        ("preview", c_uint32),
        ("reserved", c_uint32),
    ]
