"""SM100 forward: tcgen05, tensor memory, two query tiles in ping-pong; start reading at `plan`."""
