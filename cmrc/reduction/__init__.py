"""One verb from a model and a goal to a small, verified model.

samples.py    data of any kind as rows, split into calibration and held-out
images.py     a folder of pictures as such rows
goals.py      what is asked, whether a size meets it, and which size is chosen
measuring.py  what a size costs and how well it answers, on held-out data
workfolder.py what is done so far, so that a run continues and another choice costs seconds
reducer.py    `cmrc.reduce`: the stages in their order
result.py     what comes out: the table, the verdict, JSON
"""
