"""The lab's figures: what they draw, what they return, what they refuse."""

import inspect
import itertools
import subprocess
import sys

import numpy as np
import pytest

from ejkernel.errors import InvalidInputError
from ejkernel.lab import visualization
from ejkernel.lab.visualization import (
    plot_flash_attn_improvement,
    plot_gemm_gemv_latency,
    plot_gemm_gemv_latency_split,
    plot_gemm_torch_matmul_latency,
    plot_roofline,
    set_style,
)

NAN, INF = np.nan, np.inf
SIZES, GEMM, GEMV = [256, 512, 1024, 2048], [0.012, 0.06, 0.4, 3.0], [0.008, 0.009, 0.01, 0.02]


# --- without matplotlib -------------------------------------------------------------------------------------


def test_signatures():
    expected = {
        set_style: "()",
        plot_roofline: "(gpu_name, peak_flops, peak_bandwidth, operations=None, x_range=None, y_range=None, title=None,"
        " ax=None, *, ceilings=None)",
        plot_gemm_gemv_latency: "(sizes, gemm_latency_ms, gemv_latency_ms, title=None, xlabel='Matrix dimension (N)',"
        " ylabel='Latency (ms)', ax=None)",
        plot_gemm_gemv_latency_split: "(sizes, gemm_latency_ms, gemv_latency_ms, title='GEMM vs GEMV Latency',"
        " xlabel='Matrix dimension (N)', ylabel='Latency (ms)')",
        plot_gemm_torch_matmul_latency: "(sizes, gemm_tiled_latency_ms, torch_matmul_latency_ms, title=None,"
        " xlabel='Matrix dimension (N)', ylabel='Latency (ms)', ax=None)",
        plot_flash_attn_improvement: "(df, latency_cols=('std_ms', 'flash_ms'),"
        " memory_cols=('std_mem_gb', 'flash_mem_gb'), seq_len_col='seq_len', title=None, annotate_speedup=True,"
        " annotate_mem_reduction=True, bar_width=0.38, ax=None)",
    }
    for function, signature in expected.items():
        found = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
        assert str(inspect.Signature(bare)) == signature
    assert {function.__name__ for function in expected} == set(visualization.__all__)


def test_importing_loads_no_optional_package():
    code = (
        "import sys\n"
        "from ejkernel.lab.config import *\n"
        "from ejkernel.lab.visualization import *\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize(
    "draw",
    [
        set_style,
        lambda: plot_roofline("A100", 19.5, 2.0),
        lambda: plot_gemm_gemv_latency(SIZES, GEMM, GEMV, ax="any"),
        lambda: plot_gemm_gemv_latency_split(SIZES, GEMM, GEMV),
    ],
)
def test_without_matplotlib(monkeypatch, draw):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as error:
        draw()
    assert str(error.value) == "a plot needs matplotlib: pip install '.[lab]' in a clone of ejkernel"


# --- with it ------------------------------------------------------------------------------------------------


@pytest.fixture
def plt():
    """pyplot without a display, with its own settings, where a test must account for the figures it leaves open."""
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    with matplotlib.rc_context():
        import matplotlib.pyplot as plt

        plt.switch_backend("Agg")
        matplotlib.rcdefaults()
        assert plt.get_fignums() == []
        yield plt
        plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def tick_labels(ax):
    ax.figure.draw_without_rendering()
    (left, right), ticks = ax.get_xlim(), zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    return [label.get_text() for place, label in ticks if left <= place <= right]


def test_importing_leaves_the_style_alone():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    code = (
        "import matplotlib; before = dict(matplotlib.rcParams)\n"
        "import ejkernel.lab.visualization as v; assert dict(matplotlib.rcParams) == before\n"
        "v.set_style(); assert dict(matplotlib.rcParams) != before"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_roofline("A100", 19.5, 2.0),
        lambda: plot_gemm_gemv_latency(SIZES, GEMM, GEMV),
        lambda: plot_gemm_gemv_latency_split(SIZES, GEMM, GEMV),
        lambda: plot_gemm_torch_matmul_latency(SIZES, GEMM, GEMV),
        lambda: plot_flash_attn_improvement(frame()),
    ],
)
def test_every_plot_sets_the_style_and_makes_one_figure(plt, draw):
    pytest.importorskip("pandas", reason="pandas is not installed")
    assert plt.rcParams["axes.spines.top"] is True
    backend = plt.get_backend()
    draw()
    assert plt.rcParams["axes.spines.top"] is False
    assert plt.get_backend() == backend
    assert len(plt.get_fignums()) == 1


# roofline


def roof_of(line):
    return np.array(line.get_xdata()), np.array(line.get_ydata())


def test_the_documented_roofline(plt):
    ax = plot_roofline("A100", 19.5, 2.0, operations={"gemm_1024": 341.3, "gemv_1024": 1.0})
    assert isinstance(ax, plt.Axes)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_title() == "A100 roofline"
    assert ax.get_xlabel() == "Arithmetic intensity (FLOPs/Byte)"
    assert ax.get_ylabel() == "Performance (TFLOPS)"
    x, y = roof_of(ax.lines[0])
    np.testing.assert_allclose(y, np.minimum(19.5, 2.0 * x))
    assert 9.75 in x
    assert (x[0], x[-1]) == pytest.approx(ax.get_xlim())
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1]
    assert points == [(9.75, 19.5), (341.3, 19.5), (1.0, 2.0)]
    assert set(texts(ax)) == {
        "ridge point: 9.75 FLOPs/Byte",
        "19.5 TFLOPS",
        "2 TB/s",
        "memory-bound",
        "compute-bound",
        "gemm_1024",
        "gemv_1024",
    }
    assert ax.get_legend() is None
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert left < 1.0 < 341.3 < right
    assert bottom < 2.0 < 19.5 < top
    colours = {text.get_text(): text.get_color() for text in ax.texts}
    marks = {line.get_xdata()[0]: line.get_color() for line in ax.lines if len(line.get_xdata()) == 1}
    assert marks[341.3] == colours["compute-bound"] != marks[1.0] == colours["memory-bound"]


def test_a_roofline_of_nothing_but_the_roof(plt):
    ax = plot_roofline("H200", 989.4, 4.8, title="Roof")
    assert ax.get_title() == "Roof"
    assert "ridge point: 206 FLOPs/Byte" in texts(ax)
    assert ax.get_xlim()[0] < 989.4 / 4.8 / 10
    assert ax.get_xlim()[1] > 989.4 / 4.8 * 10


def test_measured_operations_and_ceilings(plt):
    operations = {"flash": (2048, 610), "gemv": (1.0, 4.1), "model": 20.0}
    ax = plot_roofline("H200", 989.4, 4.8, operations, ceilings=(760, 4.2))
    x, y = roof_of(ax.lines[1])
    np.testing.assert_allclose(y, np.minimum(760, 4.2 * x))
    assert ax.lines[0].get_linestyle() != ax.lines[1].get_linestyle()
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1]
    assert points[1:] == [(2048, 610), (1.0, 4.1), (20.0, pytest.approx(96.0))]
    assert {"flash (80%)", "gemv (98%)", "model"} <= set(texts(ax))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "data sheet",
        "measured: 760 TFLOPS, 4.2 TB/s",
        "operation (% of the measured roof)",
    ]


def test_shares_of_the_data_sheet(plt):
    ax = plot_roofline("H200", 1000, 4.0, {"flash": [2048, 610], "slow": (1, 0.001)})
    assert "flash (61%)" in texts(ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "operation (% of the data sheet roof)"
    assert ax.get_ylim()[0] < 0.001
    assert "slow (<1%)" in texts(ax)
    assert ax.get_ylim()[1] > 1000
    assert "fast (125%)" in texts(plot_roofline("H200", 1000, 4.0, {"fast": np.array([2048, 1250])}))


def test_roofline_ranges(plt):
    ax = plot_roofline("A100", 312, 2.0, {"gemm": 341.3, "gemv": 1.0}, x_range=(200, 5000), y_range=(10, 1000))
    assert ax.get_xlim() == (200, 5000)
    assert ax.get_ylim() == (10, 1000)
    assert "gemm" in texts(ax)
    assert "gemv" not in texts(ax)  # out of sight
    assert "memory-bound" not in texts(ax)


def test_labels_do_not_overlap(plt):
    from matplotlib.text import Text

    operations = {f"gemm_{n}": n / 6 for n in (32, 64, 128, 256, 512, 1024, 2048)}
    operations |= {f"gemv_{n}": 0.5 - 1 / n for n in (256, 512, 1024, 2048)}
    operations |= {"softmax": (0.6, 0.01), "add": (0.08, 0.001)}
    ax = plot_roofline("CPU", 0.12, 0.02, operations, ceilings=(0.1, 0.018))
    ax.figure.draw_without_rendering()
    frame = ax.get_window_extent()
    # of an annotation, the text alone without its line
    boxes = {text.get_text(): Text.get_window_extent(text) for text in ax.texts if text.get_rotation() == 0}
    assert len([name for name in boxes if name.startswith("gem")]) == 11
    boxes["legend"] = ax.get_legend().get_window_extent()
    for (first, box), (second, other) in itertools.combinations(boxes.items(), 2):
        width = min(box.x1, other.x1) - max(box.x0, other.x0)
        height = min(box.y1, other.y1) - max(box.y0, other.y0)
        assert min(width, height) < 1, (first, second)
    for name, box in boxes.items():
        assert frame.x0 - 1 <= box.x0, name
        assert box.x1 <= frame.x1 + 1, name
        assert frame.y0 - 1 <= box.y0, name
        assert box.y1 <= frame.y1 + 1, name


def test_rooflines_on_given_axes(plt):
    fig, axes = plt.subplots(1, 2)
    assert plot_roofline("A100", 19.5, 2.0, {"gemm": 100.0}, ax=axes[1]) is axes[1]
    assert plt.get_fignums() == [fig.number]
    assert not axes[0].lines


def test_a_figure_that_pyplot_does_not_know(plt):
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plot_roofline("A100", 19.5, 2.0, {"gemm": 100.0}, ax=ax) is ax
    assert plt.get_fignums() == []


def points_of(ax):
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1][1:]


def test_operations_of_many_kinds(plt):
    operations = {"number": np.array(4.0), "scalar": np.float32(2.0), "pair": np.array([4.0, 1.5]), "list": [8, 3]}
    assert points_of(plot_roofline("A100", 19.5, 2.0, operations)) == [(4.0, 8.0), (2.0, 4.0), (4.0, 1.5), (8.0, 3.0)]


def test_operations_in_a_series(plt):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    ax = plot_roofline("A100", 19.5, 2.0, pandas.Series({"gemv": 1.0, "add": 4.0}))
    assert points_of(ax) == [(1.0, 2.0), (4.0, 8.0)]
    assert {"gemv", "add"} <= set(texts(ax))
    plt.close("all")
    for wrong in (pandas.Series(dtype=float), pandas.Series({"a": -1.0}), {"a": pandas.Series([1.0, 2.0, 3.0])}):
        with pytest.raises(InvalidInputError) as error:
            plot_roofline("A100", 19.5, 2.0, wrong)
        assert "\n" not in str(error.value)
    with pytest.raises(InvalidInputError) as error:
        plot_roofline(
            "A100", 19.5, 2.0, x_range=pandas.Series([1.0, 2.0, 3.0], index=["low", "middle", "high"], name="limits")
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("x_range", [None, (5, 1000), pytest.param((0.01, 1000), marks=pytest.mark.slow), (5.9, 10)])
@pytest.mark.parametrize("ceilings", [pytest.param(None, marks=pytest.mark.slow), (0.1, 0.018)])
def test_the_label_of_the_ridge_stays_inside(plt, x_range, ceilings):
    operations = {"gemm": (2000.0, 0.08), "gemv": (0.5, 0.004)}
    ax = plot_roofline("CPU", 0.12, 0.02, operations, x_range=x_range, ceilings=ceilings)
    ax.figure.draw_without_rendering()
    (label,) = (text for text in ax.texts if text.get_text() == "ridge point: 6 FLOPs/Byte")
    box, frame = label.get_window_extent(), ax.get_window_extent()
    assert frame.x0 <= box.x0 + 0.5
    assert box.x1 <= frame.x1
    ridge = ax.transData.transform((6, 0.12))
    assert box.y0 > ridge[1]
    if x_range == (0.01, 1000):  # where there is room it ends at the ridge
        assert box.x1 == pytest.approx(ridge[0], abs=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak_flops": 0}, "peak_flops is 0; pass a positive, finite number"),
        ({"peak_flops": "fast"}, "peak_flops is 'fast'; pass a positive, finite number"),
        ({"peak_bandwidth": NAN}, "peak_bandwidth is nan; pass a positive, finite number"),
        ({"peak_bandwidth": -2.0}, "peak_bandwidth is -2.0; pass a positive, finite number"),
        ({"operations": {}}, "operations is empty; pass at least one, or None to draw none"),
        ({"operations": [1.0]}, "operations is [1.0]; pass a dict of names to FLOPs/Byte, or None"),
        ({"operations": {"a": 0.0}}, "operations['a'] is 0.0; pass a positive, finite number"),
        ({"operations": {"a": INF}}, "operations['a'] is inf; pass a positive, finite number"),
        ({"operations": {"a": None}}, "operations['a'] is None; pass a positive, finite number"),
        ({"operations": {"a": (1, 2, 3)}}, "operations['a'] is (1, 2, 3); pass a pair (FLOPs/Byte, achieved TFLOPS)"),
        ({"operations": {"a": (1, NAN)}}, "operations['a'][1] is nan; pass a positive, finite number"),
        (
            {"operations": {"a": np.eye(3)}},
            "operations['a'] is array([[1., 0...[0., 0., 1.]]); pass a pair (FLOPs/Byte, achieved TFLOPS)",
        ),
        ({"operations": {"a": np.array(0.0)}}, "operations['a'] is array(0.); pass a positive, finite number"),
        ({"x_range": (10, 1)}, "x_range is (10, 1); pass the smaller limit first"),
        ({"x_range": (0, 1)}, "x_range[0] is 0; pass a positive, finite number"),
        ({"y_range": 5}, "y_range is 5; pass a pair (min, max)"),
        ({"ceilings": (760,)}, "ceilings is (760,); pass a pair (TFLOPS, TB/s)"),
        ({"ceilings": (760, 0)}, "ceilings[1] is 0; pass a positive, finite number"),
        ({"ax": [1, 2]}, "ax is [1, 2]; pass one matplotlib Axes, or None for a new figure"),
    ],
)
def test_bad_rooflines(plt, arguments, message):
    with pytest.raises(InvalidInputError) as error:
        plot_roofline(**({"gpu_name": "A100", "peak_flops": 19.5, "peak_bandwidth": 2.0} | arguments))
    assert str(error.value) == message
    assert plt.get_fignums() == []


# latencies

TWO_LINES = [
    (plot_gemm_gemv_latency, ("GEMM", "GEMV")),
    (plot_gemm_torch_matmul_latency, ("gemm_tiled", "torch.matmul")),
]


@pytest.mark.parametrize(("draw", "names"), TWO_LINES)
def test_two_lines(plt, draw, names):
    ax = draw(SIZES, GEMM, GEMV)
    assert isinstance(ax, plt.Axes)
    assert [line.get_label() for line in ax.lines] == list(names)
    for line, latencies in zip(ax.lines, (GEMM, GEMV), strict=True):
        assert list(line.get_xdata()) == SIZES
        assert list(line.get_ydata()) == latencies
    assert ax.lines[0].get_color() != ax.lines[1].get_color()
    assert ax.lines[0].get_marker() != ax.lines[1].get_marker()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(names)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("Matrix dimension (N)", "Latency (ms)", "")
    assert ax.get_xscale() == "log"
    assert ax.xaxis.get_transform().base == 2
    assert tick_labels(ax) == ["256", "512", "1024", "2048"]
    assert ax.get_yscale() == "log"  # 375 times apart
    assert ax.get_ylim()[0] < 0.008
    assert ax.get_ylim()[1] > 3.0


@pytest.mark.parametrize(("draw", "names"), TWO_LINES)
def test_labels_and_given_axes(plt, draw, names):
    fig, given = plt.subplots()
    assert draw(SIZES, GEMM, GEMV, title="Title", xlabel="N", ylabel="ms", ax=given) is given
    assert (given.get_title(), given.get_xlabel(), given.get_ylabel()) == ("Title", "N", "ms")
    assert not given.spines["top"].get_visible()
    assert plt.get_fignums() == [fig.number]


def test_near_values_are_on_linear_scales(plt):
    ax = plot_gemm_gemv_latency([512, 768, 1024], [1.0, 2.0, 5.0], [0.9, 1.0, 1.1])
    assert (ax.get_xscale(), ax.get_yscale()) == ("linear", "linear")
    assert ax.get_ylim()[0] == 0
    assert tick_labels(ax) == ["512", "768", "1024"]


def test_one_size(plt):
    ax = plot_gemm_gemv_latency([1024], [1.0], [2.0])
    assert [list(line.get_ydata()) for line in ax.lines] == [[1.0], [2.0]]
    assert tick_labels(ax) == ["1024"]


def test_many_sizes_have_few_ticks(plt):
    sizes = np.arange(128, 4097, 128)
    ax = plot_gemm_gemv_latency(sizes, sizes**2.0, sizes)
    assert tick_labels(ax) == ["128", "256", "512", "1024", "2048", "4096"]


def test_sizes_are_drawn_in_order(plt):
    ax = plot_gemm_gemv_latency((1024, 256, 512), np.array([3.0, 1.0, 2.0]), range(30, 0, -10))
    assert list(ax.lines[0].get_xdata()) == [256, 512, 1024]
    assert list(ax.lines[0].get_ydata()) == [1.0, 2.0, 3.0]
    assert list(ax.lines[1].get_ydata()) == [20, 10, 30]


def test_split(plt):
    fig, axes = plot_gemm_gemv_latency_split(SIZES, GEMM, GEMV)
    assert isinstance(fig, plt.Figure)
    assert isinstance(axes, np.ndarray)
    assert axes.shape == (2,)
    assert list(fig.axes) == list(axes)
    for ax, latencies, name in zip(axes, (GEMM, GEMV), ("GEMM", "GEMV"), strict=True):
        (line,) = ax.lines
        assert list(line.get_xdata()) == SIZES
        assert list(line.get_ydata()) == latencies
        assert (ax.get_title(), ax.get_ylabel(), ax.get_yscale()) == (name, "Latency (ms)", "log")
    assert fig.get_suptitle() == "GEMM vs GEMV Latency"
    assert [ax.get_xlabel() for ax in axes] == ["", "Matrix dimension (N)"]
    assert tick_labels(axes[1]) == ["256", "512", "1024", "2048"]
    assert axes[0].get_position().y0 > axes[1].get_position().y1
    assert axes[0].get_ylim() != axes[1].get_ylim()
    assert plot_gemm_gemv_latency_split(SIZES, GEMM, GEMV, title=None)[0].get_suptitle() == ""


@pytest.mark.parametrize("draw", [plot_gemm_gemv_latency, plot_gemm_torch_matmul_latency, plot_gemm_gemv_latency_split])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([], [], []), "sizes is empty; pass at least one number"),
        (([1, 2], [1.0], [1.0, 2.0]), "{0} has 1 values and sizes has 2; pass one for each of sizes"),
        (([1, 2], [1.0, 2.0], [1.0, 2.0, 3.0]), "{1} has 3 values and sizes has 2; pass one for each of sizes"),
        (([0, 2], [1.0, 2.0], [1.0, 2.0]), "sizes holds 0; pass positive, finite numbers"),
        (([1, 2], [1.0, NAN], [1.0, 2.0]), "{0} holds nan; pass positive, finite numbers"),
        (([1, 2], [1.0, 2.0], [-1.0, 2.0]), "{1} holds -1; pass positive, finite numbers"),
        (([1, 2], [1.0, INF], [1.0, 2.0]), "{0} holds inf; pass positive, finite numbers"),
        ((3, [1.0], [1.0]), "sizes is 3; pass a list of numbers"),
        (([1], ["slow"], [1.0]), "{0} is ['slow']; pass a list of numbers"),
    ],
)
def test_bad_latencies(plt, draw, columns, message):
    names = list(inspect.signature(draw).parameters)[1:3]
    with pytest.raises(InvalidInputError) as error:
        draw(*columns)
    assert str(error.value) == message.format(*names)
    assert plt.get_fignums() == []


def test_bad_axes_of_latencies(plt):
    for draw in (plot_gemm_gemv_latency, plot_gemm_torch_matmul_latency):
        with pytest.raises(InvalidInputError, match="pass one matplotlib Axes, or None for a new figure"):
            draw(SIZES, GEMM, GEMV, ax="left")
    assert plt.get_fignums() == []


# attention


def frame(**columns):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame(
        {
            "seq_len": [1024, 2048, 4096],
            "std_ms": [1.0, 2.5, 12.0],
            "flash_ms": [0.8, 1.0, 3.0],
            "std_mem_gb": [0.2, 0.9, 3.6],
            "flash_mem_gb": [0.2, 0.3, 0.4],
        }
        | columns
    )


def bars(ax):
    return [[bar.get_height() for bar in container] for container in ax.containers]


def test_bars(plt):
    df = frame()
    fig, axes = plot_flash_attn_improvement(df)
    assert isinstance(fig, plt.Figure)
    assert isinstance(axes, np.ndarray)
    assert axes.shape == (2,)
    assert bars(axes[0]) == [list(df.std_ms), list(df.flash_ms)]
    assert bars(axes[1]) == [list(df.std_mem_gb), list(df.flash_mem_gb)]
    assert texts(axes[0]) == ["1.2×", "2.5×", "4.0×"]
    assert texts(axes[1]) == ["1.0×", "3.0×", "9.0×"]
    assert [ax.get_ylabel() for ax in axes] == ["Latency (ms)", "Peak memory (GB)"]
    assert [ax.get_xlabel() for ax in axes] == ["Sequence length"] * 2
    assert [tick_labels(ax) for ax in axes] == [["1024", "2048", "4096"]] * 2
    assert [ax.get_yscale() for ax in axes] == ["linear"] * 2
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["Standard", "FlashAttention"]
    assert fig.get_suptitle() == ""
    standard, flash = axes[0].containers
    assert standard[1].get_width() == pytest.approx(0.38) == flash[1].get_width()
    assert standard[1].get_x() + 0.38 == pytest.approx(1) == flash[1].get_x()


def test_bars_as_asked(plt):
    df = frame().rename(
        columns={"std_ms": "a", "flash_ms": "b", "std_mem_gb": "c", "flash_mem_gb": "d", "seq_len": "n"}
    )
    given = plt.figure().subplots(1, 2)
    fig, axes = plot_flash_attn_improvement(
        df, ("a", "b"), ["c", "d"], "n", "Title", False, False, 0.25, ax=list(given)
    )
    assert fig is given[0].figure
    assert isinstance(axes, np.ndarray)
    assert list(axes) == list(given)
    assert plt.get_fignums() == [fig.number]
    assert bars(axes[0]) == [list(df.a), list(df.b)]
    assert bars(axes[1]) == [list(df.c), list(df.d)]
    assert texts(axes[0]) == texts(axes[1]) == []
    assert fig.get_suptitle() == "Title"
    assert axes[0].containers[0][0].get_width() == 0.25
    plt.close(fig)
    _, axes = plot_flash_attn_improvement(df, ("a", "b"), ("c", "d"), "n", annotate_speedup=False)
    assert (len(texts(axes[0])), len(texts(axes[1]))) == (0, 3)


def test_standard_attention_out_of_memory(plt):
    df = frame(std_ms=[1.0, 2.5, NAN], std_mem_gb=[0.2, NAN, NAN])
    fig, axes = plot_flash_attn_improvement(df)
    assert texts(axes[0]) == ["1.2×", "2.5×", "OOM"]
    assert texts(axes[1]) == ["1.0×", "OOM", "OOM"]
    oom = axes[0].texts[2]
    assert oom.get_position()[0] == pytest.approx(2 - 0.19)
    assert axes[0].get_ylim()[1] > 3.0
    fig.canvas.draw()


def test_standard_attention_always_out_of_memory(plt):
    fig, axes = plot_flash_attn_improvement(frame(std_ms=[NAN] * 3, std_mem_gb=[NAN] * 3))
    assert texts(axes[0]) == texts(axes[1]) == ["OOM"] * 3
    assert axes[0].get_ylim()[1] > 3.0
    fig.canvas.draw()


def test_no_memory_at_all(plt):
    fig, axes = plot_flash_attn_improvement(frame(std_mem_gb=[0.0] * 3, flash_mem_gb=[0.0] * 3))
    assert bars(axes[1]) == [[0, 0, 0]] * 2
    assert texts(axes[1]) == []
    fig.canvas.draw()


def test_bars_that_differ_much_are_on_a_logarithmic_scale(plt):
    _, axes = plot_flash_attn_improvement(frame(std_ms=[0.1, 10.0, 1000.0], flash_ms=[0.05, 4.0, 80.0]))
    assert [ax.get_yscale() for ax in axes] == ["log", "linear"]
    assert axes[0].get_ylim()[0] < 0.05
    assert axes[0].get_ylim()[1] > 1000
    assert bars(axes[0]) == [[0.1, 10.0, 1000.0], [0.05, 4.0, 80.0]]
    assert texts(axes[0]) == ["2.0×", "2.5×", "12.5×"]


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"std_ms": [0.0, 1.0, 1.0]}, {}, "df['std_ms'] holds 0; pass positive, finite numbers"),
        ({"flash_ms": [1.0, NAN, 1.0]}, {}, "df['flash_ms'] holds nan; pass positive, finite numbers"),
        ({"std_ms": [1.0, INF, 1.0]}, {}, "df['std_ms'] holds inf; pass positive, finite numbers"),
        (
            {"std_mem_gb": [1.0, -1.0, 1.0]},
            {},
            "df['std_mem_gb'] holds -1; pass zero or positive, finite numbers",
        ),
        ({"seq_len": [0, 1, 2]}, {}, "df['seq_len'] holds 0; pass positive, finite numbers"),
        (
            {},
            {"seq_len_col": "length"},
            "df has no column length but seq_len, std_ms, flash_ms, std_mem_gb, flash_mem_gb; "
            "name its columns in seq_len_col, latency_cols and memory_cols",
        ),
        ({}, {"latency_cols": "ms"}, "latency_cols is 'ms'; pass two column names: standard, flash"),
        ({}, {"memory_cols": ("a",)}, "memory_cols is ('a',); pass two column names: standard, flash"),
        ({}, {"bar_width": 0}, "bar_width is 0; pass a positive, finite number"),
        ({}, {"bar_width": 0.6}, "bar_width is 0.6; two bars share 1: pass at most 0.5"),
    ],
)
def test_bad_frames(plt, columns, arguments, message):
    with pytest.raises(InvalidInputError) as error:
        plot_flash_attn_improvement(frame(**columns), **arguments)
    assert str(error.value) == message
    assert plt.get_fignums() == []


def test_what_is_no_frame(plt):
    with pytest.raises(InvalidInputError, match="df is a dict; pass a DataFrame with the columns seq_len, std_ms"):
        plot_flash_attn_improvement({"seq_len": [1]})
    with pytest.raises(InvalidInputError, match=r"df\['seq_len'\] is empty; pass at least one number"):
        plot_flash_attn_improvement(frame()[:0])
    assert plt.get_fignums() == []


def test_bad_axes_of_bars(plt):
    fig, axes = plt.subplots(1, 3)
    other = plt.figure().subplots()
    for ax in (axes[0], axes, axes[:1], [axes[0], "right"], [axes[0], other]):
        with pytest.raises(
            InvalidInputError, match=r"pass two matplotlib Axes of one figure, \[latency_ax, memory_ax\]"
        ):
            plot_flash_attn_improvement(frame(), ax=ax)
    assert len(plt.get_fignums()) == 2
    assert not fig.axes[0].containers
