"""Programs that test or measure by hand, `python -m tests.programs.NAME`.

cameras: measure `vlora watch` with many cameras on a server of the demo.
fuzz: send mutated requests to a running server. The mutations are in `mutations`.
hostile_hour: compare healthy clients of a server with and without hostile clients.
measure_engine: compare the memory of an engine with the plan. A test runs it in its own process.
playground_pictures: draw the pictures of `docs/images` that show the playground.
step_time: measure the time of `Engine.step` without its forward pass.
"""
