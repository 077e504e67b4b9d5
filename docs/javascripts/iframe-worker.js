// The site's search runs in a Worker, which browsers refuse to pages that are opened from a folder. There, this class takes its place: it runs the
// worker's script in a hidden frame. The theme loads such a class from a CDN unless a file of this name is given (mkdocs.yml, extra.polyfills).
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((done, failed) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = () => failed(new Error(`${url} could not be loaded`));
      page.head.append(script);
    });

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><head></head>");
      page.close();
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(page, next)), Promise.resolve());
      this.ready = load(page, url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = window.Worker = IFrameWorker; // the worker's script looks for the first name to find its files
}
