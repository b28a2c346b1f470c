"""A run on one page: a self-contained HTML file that a browser shows without a network.

records   reads the run directory, with whatever of it is there
heat      step times of all ranks as one matrix, small enough to draw
drawing   the timeline as SVG
page      puts the parts together
assets/   the page's frame, its style, and the script that draws the heat map
"""
