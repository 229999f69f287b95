# SPDX-License-Identifier: Apache-2.0
"""Which shape, colour, background, motion and sound is in a clip? The rules of train/measure.py, of a film's bytes and with the standard library
alone. train/data.py says how the clips are drawn."""

import array
import cmath
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "train"))
import words

CONTRAST = 0.14 * 255  # how far a shape's pixels are from the background
PATCH = 48             # a shape, cut out and brought to one size
KEYS = ("bg", "colour", "motion", "shape", "sound")
NAMES = {"bg": words.BACKGROUND_NAMES, "colour": words.COLOUR_NAMES, "motion": words.MOTIONS, "shape": words.SHAPES, "sound": words.SOUNDS}


def median(values):
    return sorted(values)[(len(values) - 1) // 2]


# --------------------------------------------------------------------------------------------- picture

def distance_to(shape, x, y):
    """Of a place from the border of a shape of radius 1 around 0, below 0 inside (data.draw)."""
    rho = math.hypot(x, y)
    if shape == "circle":
        return rho - 1
    if shape == "square":
        return max(abs(x), abs(y)) - 0.86
    if shape == "triangle":
        k = math.sqrt(3) / 2
        return max(k * x - 0.5 * y, -k * x - 0.5 * y, y) - 0.58
    if shape == "ring":
        return abs(rho - 0.76) - 0.24
    sector = math.pi / 5
    angle = abs((math.atan2(x, -y) + sector) % (2 * sector) - sector)
    outer, inner_x, inner_y = 1.15, 0.5 * math.cos(sector), 0.5 * math.sin(sector)
    nx, ny = inner_y, outer - inner_x
    return ((rho * math.cos(angle) - outer) * nx + rho * math.sin(angle) * ny) / math.hypot(nx, ny)


class Mask:
    """The pixels of one frame that are not background."""

    def __init__(self, width, height, rows):
        self.width, self.height = width, height
        self.rows = rows  # bytes of 0 and 1
        columns = [0] * width
        self.area, sum_y = 0, 0
        for y, row in enumerate(rows):
            n = sum(row)
            if n:
                self.area += n
                sum_y += n * (y + 0.5)
                columns = list(map(int.__add__, columns, row))
        n = max(self.area, 1)
        self.y = sum_y / n / height
        self.x = sum(c * (x + 0.5) for x, c in enumerate(columns)) / n / width

    def at(self, x, y):
        return self.rows[y][x] if 0 <= x < self.width and 0 <= y < self.height else 0

    def patch(self):
        """The shape in PATCH x PATCH places around its middle, by its own size, as the bits of one number."""
        r = math.sqrt(max(self.area, 1)) * 1.1
        bits = 0
        places = [r * (2 * i / (PATCH - 1) - 1) - 0.5 for i in range(PATCH)]
        for v in places:
            y = self.y * self.height + v
            y0 = math.floor(y)
            fy = y - y0
            for u in places:
                x = self.x * self.width + u
                x0 = math.floor(x)
                fx = x - x0
                inside = (1 - fy) * ((1 - fx) * self.at(x0, y0) + fx * self.at(x0 + 1, y0)) \
                    + fy * ((1 - fx) * self.at(x0, y0 + 1) + fx * self.at(x0 + 1, y0 + 1))
                bits = bits << 1 | (inside > 0.5)
        return bits

    def core(self):
        """The places where nearly all of 5 x 5 pixels belong to the shape."""
        found = []
        sums = [[sum(row[max(x - 2, 0):x + 3]) for x in range(self.width)] if any(row) else None for row in self.rows]
        for y, row in enumerate(self.rows):
            if sums[y] is None:
                continue
            near = [s for s in sums[max(y - 2, 0):y + 3] if s is not None]
            found += [(x, y) for x, inside in enumerate(row) if inside and sum(s[x] for s in near) > 0.95 * 25]
        return found


def overlap(a, b):
    return bin(a & b).count("1") / max(bin(a | b).count("1"), 1)


_templates = {}


def templates(shape):
    """A shape of any angle as Mask.patch() has it."""
    if shape not in _templates:
        _templates[shape] = []
        size, r = 128, 0.2 * 128
        for i in range(12):
            c, s = math.cos(2 * math.pi * i / 12), math.sin(2 * math.pi * i / 12)
            place = [(j + 0.5 - size / 2) / r for j in range(size)]
            rows = [bytes(distance_to(shape, c * x + s * y, -s * x + c * y) < 0 for x in place) for y in place]
            _templates[shape].append(Mask(size, size, rows).patch())
    return _templates[shape]


def masks_of(frames, width, height):
    """A mask for each frame, and the background's colour in each line. frames: bytes of RGB."""
    background = []
    for y in range(height):
        sides = b"".join(f[y * width * 3:(y * width + 6) * 3] + f[((y + 1) * width - 6) * 3:(y + 1) * width * 3] for f in frames)
        background.append([median(sides[c::3]) for c in range(3)])
    # Whether a number is far from a background's, for all 256 of them.
    far = [[bytes(abs(v - b) > CONTRAST for v in range(256)) for b in line] for line in background]
    masks = []
    for f in frames:
        rows = []
        for y in range(height):
            line = f[y * width * 3:(y + 1) * width * 3]
            colours = [int.from_bytes(line[c::3].translate(far[y][c]), "little") for c in range(3)]
            rows.append((colours[0] | colours[1] | colours[2]).to_bytes(width, "little"))
        masks.append(Mask(width, height, rows))
    return masks, background


def nearest(colour, names):
    return min(names, key=lambda n: sum((a / 255 - b / 255) ** 2 for a, b in zip(colour, names[n])))


def motion_of(masks, width, height):
    first = lambda key: (key(masks[0]) + key(masks[1])) / 2
    last = lambda key: (key(masks[-1]) + key(masks[-2])) / 2
    dx, dy = last(lambda m: m.x) - first(lambda m: m.x), last(lambda m: m.y) - first(lambda m: m.y)
    rx, ry = (max(v) - min(v) for v in ([m.x for m in masks], [m.y for m in masks]))
    ratio = last(lambda m: m.area) / max(first(lambda m: m.area), 1)
    if ratio > 2.2:
        return "grow"
    if ratio < 0.45:
        return "shrink"
    if abs(dx) > 0.3 and abs(dx) * width > abs(dy) * height:
        return "right" if dx > 0 else "left"
    if abs(dy) > 0.3:
        return "down" if dy > 0 else "up"
    if ry > 0.25 and rx * width < 0.12 * height:
        return "bounce"
    if ry > 0.25 and rx * width > 0.3 * min(height, width):
        return "circle"
    if rx * width < 0.15 * height and ry < 0.15:
        patches = [masks[i].patch() for i in (0, len(masks) // 4, len(masks) // 3)]
        return "spin" if min(overlap(patches[0], p) for p in patches[1:]) < 0.86 else "stay"
    return None


def picture(frames, width, height):
    """{"bg", "shape", "colour", "motion"} of a clip, None where nothing was found. frames: bytes of RGB, each width * height * 3."""
    masks, background = masks_of(frames, width, height)
    ends = background[2] + background[-3]
    found = {"bg": nearest(ends, {n: a + b for n, (a, b) in words.BACKGROUNDS.items()}), "shape": None, "colour": None, "motion": None}
    if sum(m.area > 40 for m in masks) < 0.8 * len(masks):
        return found
    inside = [(f, x, y) for f, m in zip(frames, masks) for x, y in m.core()]
    if len(inside) <= 50:
        inside = [(f, x, y) for f, m in zip(frames, masks) for y, row in enumerate(m.rows) for x, v in enumerate(row) if v]
    found["colour"] = nearest([median([f[(y * width + x) * 3 + c] for f, x, y in inside]) for c in range(3)], words.COLOURS)
    found["motion"] = motion_of(masks, width, height)
    votes = dict.fromkeys(words.SHAPES, 0.0)
    for i in (1, len(masks) // 3, len(masks) // 2, 2 * len(masks) // 3, len(masks) - 2):
        p = masks[i].patch()
        for shape in votes:
            votes[shape] += max(overlap(t, p) for t in templates(shape))
    found["shape"] = max(votes, key=votes.get)
    return found


# ----------------------------------------------------------------------------------------------- sound

def drawn_sound(name, samples):
    """What data.sound draws, in the middle: a list of samples at words.RATE."""
    rate, dur, tau = words.RATE, samples / words.RATE, 2 * math.pi
    sweep = lambda a, b: lambda t: 0.35 * math.sin(tau * (a * t + (b - a) * t * t / (2 * dur)))
    soft = lambda v: 1 / (1 + math.exp(-12 * v))

    def beeps(t):
        at = t * rate / words.HOP % 8
        return 0.34 * math.sin(tau * 480 * t) * soft(at - 0.3) * soft(3.7 - at)

    def drum(t):
        at = t * rate / words.HOP % 10 * words.HOP / rate
        return 0.75 * math.sin(tau * 80 * at) * math.exp(-at * 16) + 0.3 * math.sin(tau * 280 * at) * math.exp(-at * 60)

    bank = {"low": lambda t: 0.32 * math.sin(tau * 160 * t) + 0.08 * math.sin(tau * 320 * t), "high": lambda t: 0.28 * math.sin(tau * 560 * t),
            "rising": sweep(160, 560), "falling": sweep(560, 160), "beeps": beeps, "drum": drum,
            "chord": lambda t: 0.17 * sum(math.sin(tau * f * t) for f in (320, 400, 480)), "silence": lambda t: 0.0}
    # 0.7: of each channel, when nothing moves to a side.
    times = [i / rate for i in range(samples)]
    return [0.7 * bank[name](t) * min(t / 0.01, (dur - t) / 0.02, 1) for t in times]


def fft(x):
    n = len(x)
    if n == 1:
        return x
    even, odd = fft(x[::2]), fft(x[1::2])
    turned = [o * t for o, t in zip(odd, _turns[n])]
    return [e + o for e, o in zip(even, turned)] + [e - o for e, o in zip(even, turned)]


_turns = {n: [cmath.exp(-2j * math.pi * k / n) for k in range(n // 2)] for n in (2 ** i for i in range(1, 12))}


def spectra(wave, size, hop, bins):
    """Roots of the magnitudes of the lowest bins, by windows of `size` around every `hop` samples; the ends are mirrored."""
    half = size // 2
    padded = [wave[i] for i in range(half, 0, -1)] + list(wave) + [wave[-2 - i] for i in range(half)]
    window = [0.5 - 0.5 * math.cos(2 * math.pi * i / size) for i in range(size)]
    out = []
    for at in range(0, len(wave) + 1, 2 * hop):
        one, two = padded[at:at + size], padded[at + hop:at + hop + size]  # two real ones in one transform
        both = len(two) == size
        z = fft([complex(a * w, b * w) for a, b, w in zip(one, two if both else [0] * size, window)])
        for second in range(1 + both):
            for k in range(bins):
                a, b = z[k], z[-k].conjugate()
                out.append(math.sqrt(abs(a - b if second else a + b) / 2))
    return out


_spectra = {}


def sound(left, right):
    """The name of the nearest sound. Samples at words.RATE."""
    n = len(left)
    if (math.fsum(v * v for v in left) + math.fsum(v * v for v in right)) / (2 * n) < 0.012 ** 2:
        return "silence"
    made = spectra([(a + b) / 2 for a, b in zip(left, right)], 1024, 400, 80)
    votes = {}
    for name in words.SOUNDS[:-1]:
        if (name, n) not in _spectra:
            drawn = spectra(drawn_sound(name, n), 1024, 400, 80)
            size = math.sqrt(math.fsum(v * v for v in drawn))
            _spectra[name, n] = [v / size for v in drawn]
        votes[name] = math.fsum(a * b for a, b in zip(made, _spectra[name, n]))
    return max(votes, key=votes.get)


def pitch(wave, at, length=3200, low=50, high=1000):
    """Hz of a piece of a sound by autocorrelation, to a hundredth of a sample; None where it is quiet or no tone."""
    piece = wave[at:at + length]
    if len(piece) < length or math.fsum(v * v for v in piece) / length < 1e-4:
        return None
    half, step = length // 2, 4  # coarse first: all tones lie far below a quarter of the rate
    energy = math.fsum(v * v for v in piece[:half])

    def likeness(lag):
        other = piece[lag:lag + half]
        return math.fsum(map(float.__mul__, piece[:half], other)) / math.sqrt(energy * math.fsum(v * v for v in other) + 1e-12)

    lags = range(words.RATE // high, min(words.RATE // low, half) + 1)
    rough = {lag: likeness(lag) for lag in lags[::step]}
    # The shortest lag that is nearly as good as the best: a multiple of a period is as good as one.
    best = max(rough.values())
    if best < 0.8:
        return None
    peaks = [lag for lag in rough if rough[lag] >= best - 0.05 and rough[lag] >= rough.get(lag - step, -1) and rough[lag] >= rough.get(lag + step, -1)]
    fine = {lag: likeness(lag) for lag in range(max(peaks[0] - step, 2), peaks[0] + step + 1)}
    lag = max(fine, key=fine.get)
    a, b, c = (likeness(lag + d) for d in (-1, 0, 1))
    return words.RATE / (lag + 0.5 * (a - c) / (a - 2 * b + c)) if b > max(a, c) else None


def pitches(left, right, pieces=6):
    """Pitches along a sound."""
    wave = array.array("d", ((a + b) / 2 for a, b in zip(left, right)))
    room = len(wave) - 3200
    return [pitch(wave, room * i // (pieces - 1)) for i in range(pieces)] if room > 0 else []
