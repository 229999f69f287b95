# SPDX-License-Identifier: Apache-2.0
"""How ComfyUI's sampler carries the sound, and how to get from there to what the model sees and back.

H3 denoises picture and sound on two schedules that come of one base grid: sigma = s u / (1 + (s - 1) u), with a shift s for each. ComfyUI's
samplers know one sigma, the picture's. They get the sound as c = y sigma_v / sigma_a, where y is the latent of the sound's own schedule. With
rho = s_v / s_a, the clean sound in these terms is rho times the true one, and c moves along sigma_v as

    dc/dsigma_v = (1 - rho) y + (1 + (rho - 1) sigma_a) dy/dsigma_a.

Plain numbers only: each operation is rounded to f32, as the f32 arithmetic of ComfyUI's own model is, so that both see the same sigma."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

SHIFT_VIDEO = 12.0
SHIFT_AUDIO = 3.0
SIGMA_MIN = 1e-6
ANNOUNCED_MAX = 1001


def f32(x: float) -> float:
    """The nearest f32. An f64 operation on two f32 followed by this is the f32 operation: 53 bits are more than twice 24, and two."""
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


def shifted(sigma: float, shift_from: float, shift_to: float) -> float:
    """The sigma of another shift at the same place of the base grid."""
    base = f32(sigma / f32(f32(shift_from) + f32(sigma * f32(1.0 - shift_from))))
    return f32(f32(f32(shift_to) * base) / f32(1.0 + f32(f32(shift_to - 1.0) * base)))


def announcement(sigmas: Sequence[float], shift_video: float, shift_audio: float) -> Optional[tuple[list[float], list[float]]]:
    """The schedules of picture and sound for the service, with the bits that the steps will have: ComfyUI sends f32 thousandths. None if it is
    nothing that the service takes: it need not know."""
    if not 2 <= len(sigmas) <= ANNOUNCED_MAX:
        return None
    video = [f32(f32(s * 1000.0) / 1000.0) for s in sigmas]
    if not all(0 <= s <= 1 for s in video):
        return None
    audio = [shifted(s, shift_video, shift_audio) for s in video]
    if not all(a > b for stream in (video, audio) for a, b in zip(stream, stream[1:])):
        return None
    return video, audio


@dataclass(frozen=True)
class Carrier:
    """One step. y = carry * c; the answer for the sampler is offset * y + gain * v, v = dy/dsigma_a."""

    sigma_video: float
    sigma_audio: float
    carry: float
    offset: float
    gain: float

    @property
    def plain(self) -> bool:
        """The sound is not carried."""
        return self.offset == 0.0


def carrier(sigma_video: float, rho: float, shift_video: float = SHIFT_VIDEO, shift_audio: float = SHIFT_AUDIO) -> Carrier:
    """rho: the scale at which the sampler carries the sound; 1: it does not, c is y."""
    sigma_video = max(f32(sigma_video), f32(SIGMA_MIN))
    sigma_audio = shifted(sigma_video, shift_video, shift_audio)
    if rho == 1.0:
        return Carrier(sigma_video, sigma_audio, 1.0, 0.0, 1.0)
    return Carrier(sigma_video, sigma_audio, f32(sigma_audio / sigma_video), 1.0 - rho, f32(1.0 + f32(f32(rho - 1.0) * sigma_audio)))
