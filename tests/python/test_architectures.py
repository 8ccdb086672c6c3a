"""Models as people write them, trained by a plan on three unequal workers: the losses of plain PyTorch."""

import json
import os
import unittest

import support


class Architectures(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        output = support.launch(3, os.path.join(support.HERE, "architectures_worker.py"))
        cls.report = json.loads(output.split("REPORT")[1])

    def test_there_are_enough(self):
        self.assertEqual(sorted(self.report), [name for name, _ in support.architectures()])
        self.assertGreaterEqual(len(self.report), 25)

    def test_losses_are_those_of_plain_pytorch(self):
        for name, result in self.report.items():
            with self.subTest(name):
                self.assertNotIn("error", result)
                for got, expected in zip(result["losses"], result["expected"]):
                    self.assertAlmostEqual(got, expected, delta=1e-8 * max(1, abs(expected)))
                self.assertEqual(len(result["losses"]), 5)
                # A step that did nothing would pass otherwise.
                self.assertGreater(len({round(loss, 6) for loss in result["losses"]}), 3)

    def test_parameters_and_buffers_are_those_of_plain_pytorch(self):
        for name, result in self.report.items():
            with self.subTest(name):
                self.assertLess(result.get("state_error", 1), 1e-7, result.get("worst"))
                self.assertTrue(result["counts_equal"])

    def test_work_is_divided(self):
        divided = [name for name, result in self.report.items() if result.get("cut", 0) > 0]
        self.assertGreaterEqual(len(divided), 25, sorted(set(self.report) - set(divided)))


if __name__ == "__main__":
    unittest.main()
