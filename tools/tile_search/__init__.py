"""Entry of the tile search from the source tree, and the build of the CUDA operator."""
