"""``python -m phalanx`` is the ``phalanx`` command."""

from phalanx.launch.entry import main

if __name__ == "__main__":
    main()
