"""Six-frame clips: the motion of an object as a function of time from 0 to 1."""

import math
from dataclasses import dataclass, replace

import numpy as np

from tools.demo import lexicon
from tools.demo.scenes import SIDE, Pixels, Scene, Thing, draw, random_surface, random_thing

FRAMES = 6
Rng = np.random.Generator


@dataclass(frozen=True)
class Clip:
    """An object on a surface, and the object's motion.

    scene: surface, with the object as it is before it moves.
    amount: pixels by which the object moves, or the largest factor of its size.
    cycles, offset: number of repetitions, and phase at the start, of a motion that repeats.
    other_colour: second colour of an object that changes its colour.
    """

    scene: Scene
    action: str
    amount: float
    cycles: float
    offset: float
    other_colour: str

    def at(self, time: float) -> Scene:
        """Return the scene at a time from 0 to 1."""
        thing = _MOTIONS[self.action.split()[-1]](self, self.scene.things[0], time)
        return replace(self.scene, things=() if thing is None else (thing,))

    def frames(self, times: list[float], size: int = SIDE) -> list[Pixels]:
        return [draw(self.at(time), size).pixels for time in times]


def sample_times(rng: Rng) -> list[float]:
    """Return six increasing times with random spacing, since clients sample videos differently."""
    start, end = float(rng.uniform(0, 0.04)), float(rng.uniform(0.8, 1.0))
    times = np.linspace(start, end, FRAMES) + rng.uniform(-0.015, 0.015, FRAMES)
    return [float(min(1.0, max(0.0, time))) for time in times]


def base_clip(rng: Rng, action: str | None = None) -> Clip:
    """Return a clip of the base model's task: an object moves in one direction or stands still."""
    action = action or str(rng.choice(lexicon.MOTIONS))
    travel = float(rng.uniform(20, 34)) if action.startswith("moving") else 0.0
    steps = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
    dx, dy = steps.get(action.split()[-1], (0, 0))
    side = float(rng.uniform(14, 22))
    x = _start(rng, side, dx * travel)
    y = _start(rng, side, dy * travel)
    return _clip(rng, action, (x, y, x + side, y + side), travel)


def action_clip(rng: Rng, action: str | None = None) -> Clip:
    """Return a clip of the `actions` adapter's domain. The base does not know its motions."""
    action = action or str(rng.choice(lexicon.ACTIONS))
    side, amount = float(rng.uniform(15, 20)), float(rng.uniform(1.7, 2.3))
    if action in ("bouncing", "shaking"):
        amount = float(rng.uniform(*((18, 26) if action == "bouncing" else (8, 13))))
    reach = side * 1.2 if action in ("growing", "shrinking") else side / 2
    low_x = reach + (amount if action == "shaking" else 0) + 1
    low_y = reach + (amount if action == "bouncing" else 0) + 1
    x = float(rng.uniform(low_x, SIDE - low_x)) if low_x < SIDE / 2 else SIDE / 2
    y = float(rng.uniform(low_y, SIDE - reach - 1)) if low_y < SIDE - reach - 1 else SIDE / 2
    box = (x - side / 2, y - side / 2, x + side / 2, y + side / 2)
    return _clip(rng, action, box, amount)


def _start(rng: Rng, side: float, travel: float) -> float:
    return float(rng.uniform(1 - min(0.0, travel), SIDE - 1 - side - max(0.0, travel)))


def _clip(rng: Rng, action: str, box: tuple[float, float, float, float], amount: float) -> Clip:
    thing = random_thing(rng, box, lexicon.SHAPES)
    others = [name for name in lexicon.COLOURS if name != thing.colour]
    scene = random_surface(rng, (thing,))
    cycles, offset = float(rng.uniform(1.6, 2.2)), float(rng.uniform(0, 1))
    return Clip(scene, action, amount, cycles, offset, str(rng.choice(others)))


def _scaled(thing: Thing, first: float, last: float, time: float) -> Thing:
    x, y = thing.centre
    half = (thing.box[2] - thing.box[0]) / 2 * (first + (last - first) * time)
    return replace(thing, box=(x - half, y - half, x + half, y + half))


def _wave(clip: Clip, time: float) -> float:
    return math.sin(2 * math.pi * (clip.cycles * time + clip.offset))


# By the last word of an action: function that returns the object at a time, or None while it is
# invisible.
_MOTIONS = {
    "left": lambda clip, thing, time: thing.moved(-clip.amount * time, 0),
    "right": lambda clip, thing, time: thing.moved(clip.amount * time, 0),
    "up": lambda clip, thing, time: thing.moved(0, -clip.amount * time),
    "down": lambda clip, thing, time: thing.moved(0, clip.amount * time),
    "still": lambda clip, thing, time: thing,
    "growing": lambda clip, thing, time: _scaled(thing, 0.75, clip.amount, time),
    "shrinking": lambda clip, thing, time: _scaled(thing, clip.amount, 0.75, time),
    "blinking": lambda clip, thing, time: thing if _wave(clip, time) > 0 else None,
    "bouncing": lambda clip, thing, time: thing.moved(
        0, -clip.amount * abs(math.sin(math.pi * (clip.cycles * time + clip.offset)))
    ),
    "shaking": lambda clip, thing, time: thing.moved(clip.amount * _wave(clip, time), 0),
    "recoloring": lambda clip, thing, time: replace(
        thing, colour=thing.colour if _wave(clip, time) > 0 else clip.other_colour
    ),
}
