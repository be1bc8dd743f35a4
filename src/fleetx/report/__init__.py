"""Read run folders back and show them as one HTML page or one picture (`fleetx report`). Nothing here imports torch.

metrics, read                       a folder -> Run; damaged pieces are listed, not fatal
facts, curves                       numbers and series of a run: pure functions
axis, markup                        numbers as text, units, axes; escaped HTML and tables
line_chart, stacks, strip           charts as SVG
sections, page, page.css, page.js   the page
figure                              the picture

The charts are SVG that Python writes and page.js redraws, not canvases of a chart library such as uPlot: so they are there
without scripts and in print, follow dark mode by CSS, and are read by keyboard and screen reader.
"""
