"""Looking at a run from its files alone: its status, and a page about it. Needs no torch; a run may go on
meanwhile.
"""
