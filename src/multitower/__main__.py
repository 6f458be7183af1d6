"""`python -m multitower` is `multitower`."""

from multitower_command import main

main()
