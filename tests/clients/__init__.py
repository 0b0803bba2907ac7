"""Programs that applications and agents are written with, each in an environment of its own, through lbproxy."""
