# SPDX-License-Identifier: Apache-2.0
"""What the clips are made of, and the prompts that describe them. Standard library only."""
import random

FPS, RATE, HOP = 24, 32000, 800

SHAPES = ["circle", "square", "triangle", "star", "ring"]
COLOURS = {
    "red": (222, 38, 38), "orange": (243, 140, 25), "yellow": (245, 222, 45), "green": (45, 185, 65),
    "cyan": (50, 210, 222), "blue": (48, 92, 235), "purple": (145, 60, 205), "pink": (247, 130, 192),
    "white": (248, 248, 248), "brown": (136, 84, 40),
}
COLOUR_NAMES = list(COLOURS)
# name -> (top colour, bottom colour)
BACKGROUNDS = {
    "black": ((14, 14, 17), (14, 14, 17)), "dark blue": ((14, 24, 78), (14, 24, 78)),
    "light gray": ((204, 207, 211), (204, 207, 211)), "dark green": ((14, 60, 36), (14, 60, 36)),
    "sky": ((92, 160, 236), (224, 240, 250)), "sunset": ((70, 38, 122), (250, 150, 82)),
}
BACKGROUND_NAMES = list(BACKGROUNDS)
LOW_CONTRAST = {("white", "light gray"), ("white", "sky"), ("cyan", "sky"), ("orange", "sunset"), ("pink", "sunset"),
                ("brown", "dark green"), ("purple", "sunset")}
EDGE = 1.8  # pixels over which a border is softened
SIZES = ["small", "medium", "large"]
RADII = (0.15, 0.20, 0.25)
MOTIONS = ["right", "left", "up", "down", "bounce", "circle", "grow", "shrink", "spin", "stay"]
SOUNDS = ["low", "high", "rising", "falling", "beeps", "drum", "chord", "silence"]

SHAPE_WORDS = {"circle": ["circle", "circle", "ball", "disc"], "square": ["square", "square", "box"],
               "triangle": ["triangle"], "star": ["star"], "ring": ["ring", "ring", "hoop"]}
SIZE_WORDS = {"small": ["small", "little", "tiny"], "medium": ["", "", "medium sized"], "large": ["large", "big", "huge"]}
BG_WORDS = {
    "black": ["a black background", "black"], "dark blue": ["a dark blue background", "dark blue", "a navy background"],
    "light gray": ["a light gray background", "light gray", "a light grey background"],
    "dark green": ["a dark green background", "dark green"],
    "sky": ["a blue sky", "a bright sky", "a sky gradient"],
    "sunset": ["a sunset", "a sunset gradient", "a purple and orange sunset"],
}
MOTION_WORDS = {
    "right": ["moves from left to right", "slides from left to right", "travels to the right", "moves right"],
    "left": ["moves from right to left", "slides from right to left", "travels to the left", "moves left"],
    "up": ["moves up", "rises from the bottom to the top", "floats upward", "moves upward"],
    "down": ["moves down", "falls from the top to the bottom", "sinks downward", "moves downward"],
    "bounce": ["bounces up and down", "bounces", "is bouncing"],
    "circle": ["circles around the centre", "moves around in a circle", "orbits the middle"],
    "grow": ["grows", "gets bigger", "becomes larger and larger"],
    "shrink": ["shrinks", "gets smaller", "becomes smaller and smaller"],
    "spin": ["spins", "rotates", "turns around itself"],
    "stay": ["stays still", "does not move", "rests in place", "stands still"],
}
SOUND_WORDS = {
    "low": ["a low tone", "a deep hum", "a low note"], "high": ["a high tone", "a high note", "a high pitched tone"],
    "rising": ["a rising tone", "a tone that rises", "a rising pitch"],
    "falling": ["a falling tone", "a tone that falls", "a falling pitch"],
    "beeps": ["beeps", "short beeps", "a beeping sound"], "drum": ["a drum beat", "drums", "a steady drum"],
    "chord": ["a chord", "a warm chord", "a major chord"], "silence": ["silence", "no sound", "no audio"],
}


def sample_rows(n, seed):
    """Random clip descriptions: {field: n numbers}."""
    rng = random.Random(seed)
    keys = ("shape", "colour", "size", "motion", "bg", "sound")
    rows = {k: [] for k in keys}
    for _ in range(n):
        motion = rng.randrange(len(MOTIONS))
        shape = rng.choice((1, 2, 3)) if MOTIONS[motion] == "spin" else rng.randrange(len(SHAPES))
        while True:
            colour, bg = rng.randrange(len(COLOUR_NAMES)), rng.randrange(len(BACKGROUND_NAMES))
            if (COLOUR_NAMES[colour], BACKGROUND_NAMES[bg]) not in LOW_CONTRAST:
                break
        for k, v in zip(keys, (shape, colour, rng.randrange(3), motion, bg, rng.randrange(len(SOUNDS)))):
            rows[k].append(v)
    return rows


def prompt(s, rng, keyframe=False):
    """One random sentence for a clip; `s` maps field name -> int."""
    w = lambda table, names, key: rng.choice(table[names[s[key]]])
    colour, shape = COLOUR_NAMES[s["colour"]], w(SHAPE_WORDS, SHAPES, "shape")
    size, motion = w(SIZE_WORDS, SIZES, "size"), w(MOTION_WORDS, MOTIONS, "motion")
    bg, snd = w(BG_WORDS, BACKGROUND_NAMES, "bg"), w(SOUND_WORDS, SOUNDS, "sound")
    noun = " ".join(x for x in (size, colour, shape) if x)
    art = "an" if noun[0] in "aeiou" else "a"
    if keyframe and rng.random() < 0.6:
        subj = rng.choice(["it", "the shape", f"the {shape}", f"the {colour} {shape}"])
        out = f"{subj} {motion}" + rng.choice([f", with {snd}", f" with {snd}", ""])
    else:
        over = rng.choice(["over", "on", "in front of"])
        form = rng.random()
        if form < 0.45:
            out = f"{art} {noun} {motion} {over} {bg}" + rng.choice([f", with {snd}", f" with {snd}", f" and {snd}"])
        elif form < 0.60:
            out = f"{over} {bg}, {art} {noun} {motion}, with {snd}"
        elif form < 0.72:
            out = f"{snd}: {art} {noun} {motion} {over} {bg}"
        elif form < 0.82:
            out = f"{art} {noun} {motion} {over} {bg}. the sound is {snd}"
        elif form < 0.90:
            out = f"a video of {art} {noun} that {motion} {over} {bg}. sound: {snd}"
        elif form < 0.95:
            out = f"{art} {noun} {motion}, with {snd}"
        else:
            out = f"{art} {noun} {motion} {over} {bg}"
    if rng.random() < 0.85:
        out = ". ".join(p[0].upper() + p[1:] for p in out.split(". "))
    return out + ("." if rng.random() < 0.8 else "")


def reference_prompt(s, rng):
    """One sentence for a clip whose subject is given as a picture: motion, background and sound."""
    w = lambda table, names, key: rng.choice(table[names[s[key]]])
    subj = rng.choice(["it", "the shape", "the " + w(SHAPE_WORDS, SHAPES, "shape"), "the shape of the picture"])
    over, snd = rng.choice(["over", "on", "in front of"]), w(SOUND_WORDS, SOUNDS, "sound")
    out = f"{subj} {w(MOTION_WORDS, MOTIONS, 'motion')} {over} {w(BG_WORDS, BACKGROUND_NAMES, 'bg')}"
    out += rng.choice([f", with {snd}", f" with {snd}", f". the sound is {snd}"])
    if rng.random() < 0.85:
        out = ". ".join(p[0].upper() + p[1:] for p in out.split(". "))
    return out + ("." if rng.random() < 0.8 else "")
