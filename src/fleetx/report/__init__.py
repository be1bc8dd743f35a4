"""`fleetx report`: run folders read back, and shown as one page or one picture. Nothing here imports torch.

metrics, read, logs                          a folder -> Run; damaged pieces are told, not fatal
facts, curves, ranks                         what the numbers say: pure functions
words, axis, thinning                        numbers as text, ticks, fewer points: pure functions
markup, line_chart, stacks, strip, tables    pieces of a page
show, head, learning, costs, settings, page  the page and its sections; page.css and page.js go into it
figure                                       the picture
"""
