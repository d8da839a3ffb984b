"""The runs of StellaTrain's figure: a training over links of several rates, and its kernels by themselves."""
