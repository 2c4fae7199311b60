import sys
from statistics import median
from rlplan.accuracy.reading import bundled_points
from rlplan.accuracy.compare import load_predictors; load_predictors()
from rlplan.accuracy.compare import compare_point, predict
from rlplan.accuracy.registry import Prediction
errs={}
for p in bundled_points():
    if p.kind in ("train_peak","train_steady","max_model_size"):
        try: c=compare_point(p)
        except Exception as e:
            print(p.id,'CRASH',repr(e)[:100]); continue
        if c.status=='predicted':
            if p.kind=='train_peak': errs[p.id]=abs(c.relative_error)
            print(p.id,c.measured,c.predicted) if isinstance(c.predicted,str) else print(f"{p.id:34} {c.measured if isinstance(c.measured,float|int) and c.measured<1e6 else float(c.measured)/1e9:8.2f} {c.predicted if c.predicted<1e6 else c.predicted/1e9:8.2f} {100*c.relative_error:+6.1f}%  {c.unit[:22]}", {k[:6]:round(v if v<1e6 else v/1e9,2) for k,v in (predict(p).parts or {}).items()})
        else: print(f"{p.id:34} REFUSED {c.reason[:90]}")
v=sorted(errs.values()); print(len(v), 'median',median(v),'p90',v[int(.9*len(v))], 'max', v[-1])
