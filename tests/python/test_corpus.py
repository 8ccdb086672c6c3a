"""Cases of training as people write it, on three unequal workers by one program and by a pipeline: plain PyTorch's numbers to
1e-8 (1e-5 in single precision), or refused, and nothing else.

    test_corpus.py [--duplex] FILE ...    of cases/, architectures, or the models of a library (families/)

--duplex: by one program on the batch in two parts.
"""

import json
import os
import sys
import unittest

import corpus
import support


class Corpus(unittest.TestCase):
    files = []
    duplex = False

    @classmethod
    def setUpClass(cls):
        engine = ["--engine", "duplex"] if cls.duplex else []
        output = support.launch(3, os.path.join(support.HERE, "corpus_worker.py"), *cls.files, *engine, timeout=900)
        cls.report = json.loads(output.split("REPORT")[1])

    def ran(self, engine):
        return [result for name, result in self.report.items() if name.endswith(engine) and "error" in result]

    def test_all_are_equal_or_refused(self):
        engines = 1 if self.duplex else 2
        self.assertEqual(len(self.report), sum(engines * len(corpus.cases(file)) for file in self.files))
        for name, result in self.report.items():
            with self.subTest(name):
                if result["wanted"] == "either" and "refused" in result:
                    continue
                if name.endswith("pipeline") and "inexact" in result:
                    self.assertRegex(result["inexact"], "batch normalisations? see")  # said before
                    continue
                if not name.endswith("spmd") and "the batch cannot be taken in" in result.get("refused", ""):
                    # Not proved, and says why.
                    self.assertRegex(result["refused"], r"(by|:) node \d+, \w+::|batch normalisations? see")
                    continue
                if result["wanted"] not in ("", "either"):
                    self.assertRegex(result.get("refused", "not refused"), result["wanted"])
                    continue
                self.assertNotIn("refused", result)
                self.assertLessEqual(result["error"], result["limit"], result["where"])

    def test_batches_are_in_parts(self):
        if not self.duplex:
            return
        ran = self.ran("duplex")
        self.assertGreater(len(ran), 0.6 * len(self.report))
        self.assertTrue(all(result["in_parts"] for result in ran))

    def test_work_is_divided(self):
        if self.duplex:
            return
        ran = self.ran("spmd")
        self.assertGreater(sum(result["cut"] > 0 for result in ran), 0.7 * len(ran))

    def test_pipelines_have_stages(self):
        if self.duplex:
            return
        ran = self.ran("pipeline")
        may = [
            result for name, result in self.report.items()
            if name.endswith("pipeline") and result["wanted"] in ("", "either") and "inexact" not in result
        ]  # fmt: skip
        self.assertGreater(len(ran), 0.6 * len(may))
        # The architectures are of all sizes, and one device or one stage is often faster for them.
        least = 0.15 if self.files == ["architectures"] else 0.5
        if set(self.files) <= {*corpus.LIBRARIES, "complex", "places"}:
            # So few layers that one stage, in micro-batches, is fastest.
            self.assertGreater(sum(result["in_parts"] for result in ran), 0.5 * len(ran))
            return
        self.assertGreater(sum(result["stages"] > 1 and result["in_parts"] for result in ran), least * len(ran))


if __name__ == "__main__":
    Corpus.duplex = "--duplex" in sys.argv
    Corpus.files = [name for name in sys.argv[1:] if name in corpus.files()] or corpus.files()
    unittest.main(argv=[sys.argv[0]] + [name for name in sys.argv[1:] if name not in [*corpus.files(), "--duplex"]])
