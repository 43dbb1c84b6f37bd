"""Stand-ins for the rules of Windows and macOS, under which the ordinary tests run again (`tox -e platforms`).

`pytest -p tests.platforms.windows` and `pytest -p tests.platforms.macos` put them in force for the whole process and for the Python
processes that tests start. They are no replacement for those systems: `rules.py` lists what is simulated.
"""
