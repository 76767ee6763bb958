//! Parses Xid messages, which NVIDIA's driver writes to the kernel's log when a GPU fails. Pure.

/// An Xid message: an error that the driver reports about a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Xid {
    /// The GPU's address on the PCI bus, as sysfs writes it.
    pub(crate) pci: String,
    pub(crate) number: u32,
    /// The process that caused the error, if the driver names it.
    pub(crate) pid: Option<u32>,
    /// The driver's text after the Xid number.
    pub(crate) text: String,
}

/// Most characters of the driver's text that are kept.
const TEXT_CHARS: usize = 200;

impl Xid {
    /// Parses a line of the kernel's log, such as `NVRM: Xid (PCI:0000:3b:00): 79, pid=123, name=python3,
    /// GPU has fallen off the bus.`
    pub(crate) fn parse_line(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once("NVRM: Xid (PCI:")?;
        let (pci, rest) = rest.split_once("): ")?;
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, rest) = rest.split_at(digits);
        let text: String = rest.trim_start_matches([',', ' ']).trim_end().chars().take(TEXT_CHARS).collect();
        let pid = text
            .split(", ")
            .find_map(|part| part.trim_start_matches('\'').strip_prefix("pid=")?.parse().ok());
        // The driver omits a PCI function of 0.
        let pci = if pci.contains('.') { pci.to_owned() } else { format!("{pci}.0") };
        Some(Self { pci: pci.to_lowercase(), number: number.parse().ok()?, pid, text })
    }

    /// Returns true if the message tells of broken hardware, not of a wrong program.
    pub(crate) fn is_hardware(&self) -> bool {
        matches!(self.number, 48 | 61 | 62 | 63 | 64 | 74 | 79 | 92 | 94 | 95 | 119 | 120 | 140)
    }

    /// Returns the meaning of the Xid number and the remedy, from NVIDIA's catalogue.
    pub(crate) fn meaning(&self) -> &'static str {
        match self.number {
            13 | 31 => "the program made an invalid memory access on the GPU: run it under compute-sanitizer",
            43 | 45 => "the driver stopped the program's work on the GPU, as a rule after another error",
            48 => "a double-bit error of the GPU's memory: reset the GPU, and replace it if it comes again",
            61 | 62 => "the GPU's own processor stopped: reset the GPU",
            63 | 64 => "a row of the GPU's memory was, or is to be, replaced by a spare one: reset the GPU",
            74 => "an error of NVLink: look at the link and its counters (nvidia-smi nvlink -e)",
            79 => "the GPU fell off the bus: power, heat or the slot; the node needs a restart",
            92 => "many single-bit errors of the GPU's memory",
            94 => "an error of the GPU's memory that ended this program only",
            95 => "an error of the GPU's memory that ended all programs on it: reset the GPU",
            119 | 120 => "the GPU's system processor (GSP) did not answer: reset the GPU",
            140 => "an error of the GPU's memory that could not be corrected: reset the GPU",
            _ => "see NVIDIA's catalogue of Xid errors",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xid_messages_of_the_driver_are_parsed() {
        let line = "3,1204,981234567,-;NVRM: Xid (PCI:0000:3B:00): 79, pid=1234, name=python3, GPU has fallen off the bus.\n";
        let xid = Xid::parse_line(line).unwrap();
        assert_eq!((xid.pci.as_str(), xid.number, xid.pid), ("0000:3b:00.0", 79, Some(1234)));
        assert_eq!(xid.text, "pid=1234, name=python3, GPU has fallen off the bus.");
        assert!(xid.meaning().starts_with("the GPU fell off the bus"));
        let quoted =
            Xid::parse_line("NVRM: Xid (PCI:0000:01:00.0): 31, pid='<unknown>', name=<unknown>, MMU Fault")
                .unwrap();
        assert_eq!((quoted.pci.as_str(), quoted.number, quoted.pid), ("0000:01:00.0", 31, None));
        let bare = Xid::parse_line("NVRM: Xid (PCI:0000:01:00): 48").unwrap();
        assert_eq!((bare.number, bare.text.as_str()), (48, ""));
    }

    #[test]
    fn other_kernel_log_lines_are_ignored() {
        for line in [
            "",
            "NVRM: loading",
            "NVRM: Xid (PCI:0000:01:00",
            "NVRM: Xid (PCI:0000:01:00): x",
            "NVRM: Xid (PCI:1): 99999999999",
        ] {
            assert_eq!(Xid::parse_line(line), None, "{line}");
        }
    }
}
