"""Systems whose state is with shadows, Checkmate and FlowCheck: what a training that restores asks of them."""
